// Streams: a queue and a thread each, with a seeded random delay before every launch; events; torch's device guard.
#include "device.h"

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace fake {
namespace {

std::atomic<int> delay_us{0};
std::atomic<uint64_t> seed{0};
// Held while a launch gets its number and is queued, so that numbers follow the queue.
std::mutex order_mutex;
std::map<StreamId, std::string> labels;  // what a stream is doing, for reports
std::mutex count_mutex;
std::map<std::pair<long, std::string>, long> sync_counts;  // by thread and reason

class Queue {
 public:
  explicit Queue(StreamId id) : random_(std::mt19937(uint32_t(seed * 1000003 + id))) {
    std::thread([this] { run(); }).detach();
  }

  void push(std::function<void()> work) {
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(work));
      num_pushed_++;
    }
    wake_.notify_one();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    auto until = num_pushed_;
    idle_.wait(lock, [&] { return num_done_ >= until; });
    if (auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return num_done_ == num_pushed_;
  }

  Clock clock;  // what is complete when all that is queued is; guarded by order_mutex

 private:
  void run() {
    at::set_num_threads(1);
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    c10::impl::ExcludeDispatchKeyGuard no_views(c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return !waiting_.empty(); });
        work = std::move(waiting_.front());
        waiting_.pop_front();
      }
      if (int most = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
      try {
        work();
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
      work = nullptr;
      {
        std::lock_guard lock(mutex_);
        num_done_++;
      }
      idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::function<void()>> waiting_;
  uint64_t num_pushed_ = 0, num_done_ = 0;
  std::mt19937 random_;
  std::exception_ptr error_;
};

std::mutex queues_mutex;
std::deque<Queue*> queues;  // never deleted: threads run in them
std::atomic<StreamId> next_stream{1};
thread_local StreamId current = 0;
thread_local Clock host_clock;  // what this host thread has seen complete

Queue& queue(StreamId id) {
  std::lock_guard lock(queues_mutex);
  while (StreamId(queues.size()) <= id) queues.push_back(new Queue(StreamId(queues.size())));
  return *queues[id];
}

// The clock of a stream; the caller holds order_mutex.
Clock& clock_of(StreamId id) {
  auto& clock = queue(id).clock;
  if (StreamId(clock.size()) <= id) clock.resize(id + 1, 0);
  return clock;
}

// Gives a launch its number and clock; the caller holds order_mutex.
LaunchPtr numbered(StreamId stream, std::string what, const Clock* also_after) {
  auto& clock = clock_of(stream);
  merge(clock, host_clock);
  auto number = ++clock[stream];
  auto label = labels.find(stream);
  if (label != labels.end()) what += " in " + label->second;
  auto own = std::make_shared<Launch>(Launch{stream, number, clock, std::move(what)});
  if (also_after) merge(own->clock, *also_after);
  return own;
}

std::atomic<bool> warns_of_syncs{false};

void count_sync(const std::string& why) {
  std::lock_guard lock(count_mutex);
  sync_counts[{syscall(SYS_gettid), why}]++;
}

// An event: the clock and the number of its last record, and whether that has been reached.
struct Mark {
  std::mutex mutex;
  std::condition_variable reached;
  uint64_t num_recorded = 0, num_reached = 0;
  Clock clock;  // guarded by order_mutex

  uint64_t recorded() {
    std::lock_guard lock(mutex);
    return num_recorded;
  }
  void wait(uint64_t number) {
    std::unique_lock lock(mutex);
    reached.wait(lock, [&] { return num_reached >= number; });
  }
};
using MarkPtr = std::shared_ptr<Mark>;
MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(next_stream++); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(next_stream++); }
  c10::Stream exchangeStream(c10::Stream own) const override { return stream(std::exchange(current, own.id())); }
  bool queryStream(const c10::Stream& own) const override { return queue(own.id()).is_idle(); }
  void synchronizeStream(const c10::Stream& own) const override { synchronize(own.id(), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    size_t num;
    {
      std::lock_guard lock(queues_mutex);
      num = queues.size();
    }
    for (size_t id = 0; id < num; id++) synchronize(StreamId(id), "device");
  }

  void record(void** event, const c10::Stream& own, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr(std::make_shared<Mark>());
    auto mark = mark_of(*event);
    std::lock_guard order(order_mutex);
    auto& clock = clock_of(own.id());
    merge(clock, host_clock);
    mark->clock = clock;
    uint64_t number;
    {
      std::lock_guard lock(mark->mutex);
      number = ++mark->num_recorded;
    }
    queue(own.id()).push([mark, number] {
      {
        std::lock_guard lock(mark->mutex);
        mark->num_reached = std::max(mark->num_reached, number);
      }
      mark->reached.notify_all();
    });
  }

  void block(void* event, const c10::Stream& own) const override {
    if (!event) return;
    auto mark = mark_of(event);
    std::lock_guard order(order_mutex);
    merge(clock_of(own.id()), mark->clock);
    queue(own.id()).push([mark, number = mark->recorded()] { mark->wait(number); });
  }

  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto mark = mark_of(event);
    std::lock_guard order(order_mutex);
    std::lock_guard lock(mark->mutex);
    bool is_reached = mark->num_reached >= mark->num_recorded;
    if (is_reached) merge(host_clock, mark->clock);
    return is_reached;
  }

  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_sync("event");
    auto mark = mark_of(event);
    Clock clock;
    uint64_t number;
    {
      std::lock_guard order(order_mutex);
      clock = mark->clock;
      number = mark->recorded();
    }
    mark->wait(number);
    merge(host_clock, clock);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& own) const override {
    use_on_stream(data.get(), own.id());
  }

 private:
  static c10::Stream stream(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

StreamId current_stream() { return current; }

void launch(StreamId stream, std::string what, std::function<void(const LaunchPtr&)> work, const Clock* also_after) {
  std::lock_guard order(order_mutex);
  auto own = numbered(stream, std::move(what), also_after);
  queue(stream).push([own, work = std::move(work)] { work(own); });
}

void launch_after(StreamId stream, const std::set<StreamId>& others, std::string what,
                  std::function<void(const LaunchPtr&)> work) {
  std::lock_guard order(order_mutex);
  Clock done;
  for (auto other : others) merge(done, clock_of(other));
  auto own = numbered(stream, std::move(what), &done);
  auto num_left = std::make_shared<std::atomic<size_t>>(others.size());
  auto run = [stream, own, work = std::move(work)] { queue(stream).push([own, work] { work(own); }); };
  for (auto other : others)
    queue(other).push([num_left, run] {
      if (--*num_left == 0) run();
    });
}

void synchronize(StreamId stream, const std::string& why) {
  count_sync(why);
  if (warns_of_syncs) TORCH_WARN("called a synchronizing operation: ", why);
  Clock clock;
  {
    std::lock_guard order(order_mutex);
    clock = clock_of(stream);
  }
  queue(stream).wait();
  merge(host_clock, clock);
}

}  // namespace fake

extern "C" {
// A random delay of up to so many microseconds before each launch; streams created later use the seed.
void fake_set_delay(int most_us, uint64_t seed) {
  fake::delay_us = most_us;
  fake::seed = seed;
}

// Whether an operator for which the host waits warns, as torch's CUDA backend does in its debug mode.
void fake_warn_of_syncs(int warns) { fake::warns_of_syncs = warns; }

// Names what a stream is doing from now on, for reports.
void fake_set_label(int64_t stream, const char* text) {
  std::lock_guard order(fake::order_mutex);
  fake::labels[stream] = text;
}

// Host synchronisations of a thread (its native id; 0: of all threads) since the last call, as "reason=count ...".
const char* fake_take_syncs(long thread) {
  static thread_local std::string text;
  std::lock_guard lock(fake::count_mutex);
  text.clear();
  for (auto one = fake::sync_counts.begin(); one != fake::sync_counts.end();) {
    if (thread && one->first.first != thread) {
      ++one;
      continue;
    }
    text += one->first.second + "=" + std::to_string(one->second) + " ";
    one = fake::sync_counts.erase(one);
  }
  return text.c_str();
}

// Queues a host function that reads and writes device bytes: a collective. It gets no arguments.
void fake_host_function(int64_t stream, const char* what, void (*function)(), const void* source, size_t source_bytes,
                        const void* target, size_t target_bytes) {
  fake::launch(stream, what, [=](const fake::LaunchPtr& own) {
    fake::touch(own, source, source_bytes, false);
    fake::touch(own, target, target_bytes, true);
    function();
  });
}
}
