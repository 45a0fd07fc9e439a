// Memory: device addresses are a range without access, and the bytes behind them are at a fixed distance.
//
// A freed block is poisoned in the order of the stream it was allocated on, after the streams named by record_stream.
// A launch on any other stream that is not ordered before that is reported, as it would read another tensor's bytes.
#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace fake {
namespace {

constexpr size_t kSpace = size_t(1) << 36;  // of addresses
constexpr size_t kGrain = 512;
std::atomic<size_t> most_bytes{size_t(64) << 20};  // memory of the device

struct Block {
  char* begin;
  size_t bytes;
  StreamId stream;               // on which it was allocated
  std::set<StreamId> used_on{};  // by record_stream
};

std::mutex mutex;
char *device_base = nullptr, *host_base = nullptr;
size_t top = 0, in_use = 0;
std::map<std::pair<StreamId, size_t>, std::vector<Block*>> free_blocks;
std::map<const void*, Block*> live;

char* reserve(int access) {
  void* found = mmap(nullptr, kSpace, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "fake device: cannot reserve address space");
  return static_cast<char*>(found);
}

Block* take(size_t bytes) {
  std::lock_guard lock(mutex);
  if (!device_base) {
    device_base = reserve(PROT_NONE);
    host_base = reserve(PROT_READ | PROT_WRITE);
  }
  auto& known = free_blocks[{current_stream(), bytes}];
  TORCH_CHECK(in_use + bytes <= most_bytes && top + bytes <= kSpace, "fake device: out of memory: ", bytes,
              " bytes wanted, ", most_bytes - in_use, " free");
  Block* block;
  if (known.empty()) {
    block = new Block{device_base + top, bytes, current_stream()};
    top += bytes;
  } else {
    block = known.back();
    known.pop_back();
  }
  in_use += bytes;
  live[block->begin] = block;
  return block;
}

void poison(Block* block, const LaunchPtr& own) {
  touch(own, block->begin, block->bytes, true);
  memset(host_view(block->begin), 0xFF, block->bytes);
}

void give_back(Block* block) {
  std::lock_guard lock(mutex);
  in_use -= block->bytes;
  free_blocks[{block->stream, block->bytes}].push_back(block);
}

void release(void* address) {
  if (!address) return;
  Block* block;
  {
    std::lock_guard lock(mutex);
    auto found = live.find(address);
    block = found->second;
    live.erase(found);
  }
  auto others = std::exchange(block->used_on, {});
  others.erase(block->stream);
  auto what = "freeing of " + std::to_string(block->bytes) + " bytes";
  if (others.empty()) {
    launch(block->stream, what, [block](const LaunchPtr& own) { poison(block, own); });
    give_back(block);
  } else {
    launch_after(block->stream, others, what, [block](const LaunchPtr& own) {
      poison(block, own);
      give_back(block);
    });
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, device()};
    auto* block = take((bytes + kGrain - 1) / kGrain * kGrain);
    return {block->begin, block->begin, &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    launch(current_stream(), "copy of a storage", [=](const LaunchPtr& own) {
      touch(own, source, bytes, false);
      touch(own, target, bytes, true);
      memcpy(host_view(target), host_view(source), bytes);
    });
  }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDeviceType, &allocator);

// Pinned memory: ordinary host memory that is known to be pinned.
std::map<const void*, size_t> pinned;

void unpin(void* address) {
  if (!address) return;
  {
    std::lock_guard lock(mutex);
    pinned.erase(address);
  }
  free(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    std::lock_guard lock(mutex);
    if (address) pinned[address] = bytes;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
};
PinnedAllocator pinned_allocator;

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes()))
      allocator.copy_data(data.get(), storage.data_ptr().get(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

char* host_view(const void* address) {
  return address ? host_base + (static_cast<const char*>(address) - device_base) : nullptr;
}

bool is_pinned(const void* address) {
  std::lock_guard lock(mutex);
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin()) return false;
  auto own = std::prev(next);
  return static_cast<const char*>(address) < static_cast<const char*>(own->first) + own->second;
}

void use_on_stream(const void* address, StreamId stream) {
  std::lock_guard lock(mutex);
  auto next = live.upper_bound(address);
  if (next == live.begin()) return;
  auto* block = std::prev(next)->second;
  if (static_cast<const char*>(address) < block->begin + block->bytes) block->used_on.insert(stream);
}

}  // namespace fake

extern "C" {
void* fake_host_view(void* address) { return fake::host_view(address); }
void fake_set_memory(size_t bytes) { fake::most_bytes = bytes; }
// Free and total bytes of the device.
void fake_memory(size_t* out) {
  std::lock_guard lock(fake::mutex);
  out[0] = fake::most_bytes - fake::in_use;
  out[1] = fake::most_bytes;
}
void fake_use_on_stream(void* address, int64_t stream) { fake::use_on_stream(address, stream); }
}
