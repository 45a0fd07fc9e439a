// Time buckets of gaps between a query and a key, as defined in ops/attention.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

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

}  // namespace nestpipe
