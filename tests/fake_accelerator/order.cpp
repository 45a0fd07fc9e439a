// Happens-before: every launch carries a vector clock, every range of bytes its last write and the reads since.
//
// Two accesses to the same bytes, one of them a write, are a race unless the clock of the later one contains the
// earlier one. Clocks come from queues, events and synchronisations alone, so a missing wait is seen in every run.
#include "device.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace fake {

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

namespace {

struct Range {
  uintptr_t end;
  LaunchPtr write;
  std::vector<LaunchPtr> reads;  // since the write; the last one of each stream
};

constexpr size_t kMaxReports = 20;
std::mutex mutex;
std::map<uintptr_t, Range> ranges;  // by first byte; disjoint
std::vector<std::string> reports;
size_t num_reports = 0;

bool is_ordered(const LaunchPtr& before, const LaunchPtr& after) {
  return before->stream == after->stream ||
         (size_t(before->stream) < after->clock.size() && after->clock[before->stream] >= before->number);
}

std::string place(const LaunchPtr& one) {
  return one->what + " (number " + std::to_string(one->number) + " on stream " + std::to_string(one->stream) + ")";
}

void report_locked(const std::string& problem) {
  if (num_reports++ < kMaxReports) reports.push_back(problem);
}

void check(const LaunchPtr& before, const char* did, const LaunchPtr& after, const char* does, size_t bytes) {
  if (before && !is_ordered(before, after))
    report_locked(place(after) + " " + does + " " + std::to_string(bytes) + " bytes that " + place(before) + " " +
                  did + ", and nothing orders the two");
}

void split(uintptr_t at) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return;
  auto own = std::prev(next);
  if (own->first == at || own->second.end <= at) return;
  Range upper = own->second;
  own->second.end = at;
  ranges.emplace(at, std::move(upper));
}

}  // namespace

void touch(const LaunchPtr& launch, const void* address, size_t bytes, bool writes) {
  if (!bytes) return;
  const auto begin = uintptr_t(address), end = begin + bytes;
  std::lock_guard lock(mutex);
  split(begin);
  split(end);
  auto own = ranges.lower_bound(begin);
  for (uintptr_t at = begin; at < end;) {
    if (own == ranges.end() || own->first > at) {  // never touched
      auto gap_end = own == ranges.end() ? end : std::min(end, own->first);
      if (!writes) ranges.emplace(at, Range{gap_end, nullptr, {launch}});
      at = gap_end;
      continue;
    }
    auto& range = own->second;
    check(range.write, "wrote", launch, writes ? "overwrites" : "reads", range.end - own->first);
    at = range.end;
    if (writes) {
      for (auto& read : range.reads) check(read, "reads", launch, "overwrites", range.end - own->first);
      own = ranges.erase(own);
      continue;
    }
    auto same = std::find_if(range.reads.begin(), range.reads.end(),
                             [&](const LaunchPtr& read) { return read->stream == launch->stream; });
    if (same == range.reads.end())
      range.reads.push_back(launch);
    else
      *same = launch;
    ++own;
  }
  if (writes) ranges[begin] = Range{end, launch, {}};
}

void report(const std::string& problem) {
  std::lock_guard lock(mutex);
  report_locked(problem);
}

}  // namespace fake

extern "C" {
// The reports so far, one per line, and forgets them; the pointer is valid until the next call of the same thread.
const char* fake_take_reports() {
  static thread_local std::string text;
  std::lock_guard lock(fake::mutex);
  text.clear();
  for (auto& one : fake::reports) text += one + "\n";
  if (fake::num_reports > fake::reports.size())
    text += "... and " + std::to_string(fake::num_reports - fake::reports.size()) + " more\n";
  fake::reports.clear();
  fake::num_reports = 0;
  return text.c_str();
}
}
