// A hostile accelerator that runs on the CPU, for tests of order, placement and lifetime.
//
//     order.cpp     vector clocks: which launch happened before which, and who touched each byte last
//     streams.cpp   queues with a thread and random delays each, events, and torch's device guard
//     memory.cpp    addresses that the host cannot read, an allocator that poisons freed blocks, pinned memory
//     kernels.cpp   every torch operator: queued on the current stream, computed by the CPU's kernels
//     views.cpp     operators that launch nothing: new tensors and views
//
// What real devices forgive by luck fails here always: an access that no event, stream or synchronisation orders after
// another one of the same bytes is reported, whatever the threads did this time.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace fake {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return {kDeviceType, 0}; }

using StreamId = int64_t;
using Clock = std::vector<uint64_t>;  // by stream: the last launch that is known to be complete

void merge(Clock& into, const Clock& other);

// ---- order.cpp

// One kernel, copy, collective or release of memory on a stream.
struct Launch {
  StreamId stream;
  uint64_t number;  // on its stream
  Clock clock;      // what is complete before it starts
  std::string what;
};
using LaunchPtr = std::shared_ptr<const Launch>;

// Records that a running launch touches device bytes; reports every unordered pair.
void touch(const LaunchPtr& launch, const void* address, size_t bytes, bool writes);
void report(const std::string& problem);

// ---- streams.cpp

StreamId current_stream();

// Queues work on a stream; `also_after` are clocks that order it besides those of its stream and of the calling thread.
void launch(StreamId stream, std::string what, std::function<void(const LaunchPtr&)> work,
            const Clock* also_after = nullptr);
// The same, but the work runs when all work queued so far on `others` is done. The stream itself does not wait.
void launch_after(StreamId stream, const std::set<StreamId>& others, std::string what,
                  std::function<void(const LaunchPtr&)> work);
// Blocks the host until everything queued on the stream is done. Counted under `why`, by thread.
void synchronize(StreamId stream, const std::string& why);

// ---- memory.cpp

char* host_view(const void* device_address);  // where the bytes behind a device address really are
bool is_pinned(const void* address);
void use_on_stream(const void* address, StreamId stream);  // torch's record_stream

}  // namespace fake
