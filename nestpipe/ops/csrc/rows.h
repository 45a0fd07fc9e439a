// Rows by slot, for the kernels that update them: the arguments of an update, and its loop over rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "share.h"

namespace nestpipe {

constexpr int64_t kAhead = 8;
constexpr int64_t kLine = 64;
constexpr int64_t kMaxLines = 16;  // cache lines prefetched of a row; the hardware prefetcher does the rest
constexpr int64_t kMinShare = 1 << 10;  // fewer rows are not worth a thread
constexpr int64_t kBlock = 32;  // bytes copied at a time
constexpr int64_t kNone = -1;  // the slot of a place that has none

inline int64_t first_wrong(const int64_t* slots, int64_t n, int64_t num_slots) {
  uint64_t largest = 0;  // a negative slot is a huge number
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<uint64_t>(slots[i]));
  if (n == 0 || largest < static_cast<uint64_t>(num_slots)) return n;
  return std::find_if(slots, slots + n, [=](int64_t slot) { return slot < 0 || slot >= num_slots; }) - slots;
}

template <int kWrite>
void prefetch(const void* row, int64_t num_bytes) {
  const char* bytes = static_cast<const char*>(row);
  const int64_t num_lines = std::min((num_bytes + kLine - 1) / kLine, kMaxLines);
  for (int64_t line = 0; line < num_lines; ++line) __builtin_prefetch(bytes + line * kLine, kWrite);
}

inline void copy_row(char* __restrict into, const char* __restrict from, int64_t num_bytes) {
  int64_t done = 0;
  for (; done + kBlock <= num_bytes; done += kBlock) __builtin_memcpy(into + done, from + done, kBlock);
  if (done < num_bytes) std::memcpy(into + done, from + done, num_bytes - done);
}

inline void add_row(float* __restrict into, const float* __restrict row, int64_t dim) {
  for (int64_t k = 0; k < dim; ++k) into[k] += row[k];
}

}  // namespace nestpipe

extern "C" {

// The arguments of every update.
struct nestpipe_rows {
  float* weights;  // [num_slots, dim]
  int64_t num_slots;
  int64_t dim;
  const int64_t* slots;  // [n], distinct; or kNone, which is left out
  int64_t n;
  const float* grads;  // [n, dim]; or null, if they are sums of what arrived
  float lr;
  float keep;  // what weight decay leaves of a weight: 1 without
  int64_t num_threads;
  const int64_t* starts;  // [n + 1]: where what arrived for each place starts in `rows`; at least one each
  const float* const* rows;  // in the order of the sums
};

}  // extern "C"

namespace nestpipe {

struct Column {
  const void* start;
  int64_t row_bytes;
};

inline int64_t first_wrong(const nestpipe_rows& call) {
  int64_t i = first_wrong(call.slots, call.n, call.num_slots);
  while (i < call.n && call.slots[i] >= kNone && call.slots[i] < call.num_slots) ++i;
  return i;
}

// The gradient of a place: given, or the sum of what arrived for it, the first being copied; valid until the next call of the
// thread.
inline const float* gradient(const nestpipe_rows& call, int64_t i) {
  if (call.rows == nullptr) return call.grads + i * call.dim;
  const float *const *row = call.rows + call.starts[i], *const *end = call.rows + call.starts[i + 1];
  const float* first = *row;
  if (++row == end) return first;
  thread_local std::vector<float> sum;
  sum.assign(first, first + call.dim);
  for (; row != end; ++row) add_row(sum.data(), *row, call.dim);
  return sum.data();
}

// Calls row(slot, gradient) for every place that has a slot, with the rows to come prefetched: those of the weights, of
// the columns in `others` (with the bytes of a row) and of what arrived.
template <typename Row>
int64_t update(const nestpipe_rows& call, std::initializer_list<Column> others, const Row& row) {
  const int64_t wrong = first_wrong(call);
  if (wrong < call.n) return wrong;
  const int64_t row_bytes = call.dim * static_cast<int64_t>(sizeof(float));
  share(call.n, call.num_threads, kMinShare, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && call.slots[i + kAhead] != kNone) {
        const int64_t next = call.slots[i + kAhead];
        prefetch<1>(call.weights + next * call.dim, row_bytes);
        for (const Column& other : others) {
          prefetch<1>(static_cast<const char*>(other.start) + next * other.row_bytes, other.row_bytes);
        }
        if (call.rows != nullptr) prefetch<0>(call.rows[call.starts[i + kAhead]], row_bytes);
      }
      if (call.slots[i] != kNone) row(call.slots[i], gradient(call, i));
    }
  });
  return call.n;
}

}  // namespace nestpipe
