// Time buckets of gaps between a query and a key, as defined in ops/attention.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace nestpipe {

// The bucket of a gap: the number of boundaries at or below it. Tries the previous bucket first: neighbouring gaps are alike.
class Buckets {
 public:
  Buckets(const int64_t* boundaries, int64_t count) : boundaries_(boundaries), count_(count) {}
  uint8_t of(int64_t gap) {
    if (gap < low_ || gap >= high_) {
      last_ = std::upper_bound(boundaries_, boundaries_ + count_, gap) - boundaries_;
      low_ = last_ ? boundaries_[last_ - 1] : 0;
      high_ = last_ < count_ ? boundaries_[last_] : std::numeric_limits<int64_t>::max();
    }
    return static_cast<uint8_t>(last_);
  }

 private:
  const int64_t* boundaries_;
  int64_t count_, last_ = 0, low_ = 1, high_ = 0;
};

// Absolute difference in seconds, at least 1, without overflow.
inline int64_t gap_of(int64_t x, int64_t y) {
  const uint64_t gap = x > y ? static_cast<uint64_t>(x) - static_cast<uint64_t>(y) : static_cast<uint64_t>(y) - static_cast<uint64_t>(x);
  return static_cast<int64_t>(std::clamp<uint64_t>(gap, 1, std::numeric_limits<int64_t>::max()));
}

// Buckets of many queries over keys in the order of time: runs, whose ends move forward from query to query.
class BucketRuns {
 public:
  BucketRuns(const int64_t* boundaries, int64_t count, const int64_t* keys, int64_t num_keys)
      : boundaries_(boundaries), keys_(keys), is_sorted_(std::is_sorted(keys, keys + num_keys)), ends_(count, 0) {}
  // Writes the buckets of the first `seen` keys, and returns their number; 0, and nothing, if an order does not hold.
  int64_t fill(int64_t asked, int64_t seen, uint8_t* to) {
    if (!is_sorted_ || asked < before_ || !seen || keys_[seen - 1] > asked) return 0;
    before_ = asked;
    int64_t end = seen;
    size_t bucket = 0;
    for (; bucket < ends_.size() && end; ++bucket) {
      int64_t& first = ends_[bucket];  // of the keys that are nearer than this boundary
      while (first < end && gap_of(asked, keys_[first]) >= boundaries_[bucket]) ++first;
      std::fill(to + first, to + end, static_cast<uint8_t>(bucket));
      end = first;
    }
    std::fill(to, to + end, static_cast<uint8_t>(bucket));
    return seen;
  }

 private:
  const int64_t *boundaries_, *keys_;
  bool is_sorted_;
  int64_t before_ = std::numeric_limits<int64_t>::min();
  std::vector<int64_t> ends_;
};

}  // namespace nestpipe
