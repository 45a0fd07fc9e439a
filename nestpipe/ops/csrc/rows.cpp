// Rows by slot: copies, sums and optimizer updates in place.
//
// Columns are [num_slots, D] and dense. Every element is computed by exactly rounded operations in one fixed order (no
// fused multiply-add: see the flags in native_library.py), so it is bitwise independent of its neighbours and of vector
// boundaries, and bitwise identical to the same operations in torch (row_optimizer.py). Threads divide the places of a call;
// its slots are distinct wherever several threads write rows.
//
// Random access is bound by memory latency, so every loop prefetches the row kAhead ahead. A function that takes
// slots returns n, or the place of the first slot that does not exist; then nothing has changed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "share.h"

namespace {

constexpr int64_t kAhead = 8;
constexpr int64_t kLine = 64;
constexpr int64_t kMaxLines = 16;  // cache lines prefetched of a row; the hardware prefetcher does the rest
constexpr int64_t kMinShare = 1 << 10;  // fewer rows are not worth a thread
constexpr int64_t kBlock = 32;  // bytes copied at a time
constexpr int64_t kNone = -1;  // the slot of a place that has none

int64_t first_wrong(const int64_t* slots, int64_t n, int64_t num_slots) {
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

void copy_row(char* __restrict into, const char* __restrict from, int64_t num_bytes) {
  int64_t done = 0;
  for (; done + kBlock <= num_bytes; done += kBlock) __builtin_memcpy(into + done, from + done, kBlock);
  if (done < num_bytes) std::memcpy(into + done, from + done, num_bytes - done);
}

void add_row(float* __restrict into, const float* __restrict row, int64_t dim) {
  for (int64_t k = 0; k < dim; ++k) into[k] += row[k];
}

// The sum of dim >= 1 numbers, which are overwritten: the upper half is added to the lower one until one is left.
float fold(float* values, int64_t dim) {
  for (int64_t width = dim; width > 1;) {
    const int64_t half = (width + 1) / 2;
    add_row(values, values + half, width - half);
    width = half;
  }
  return values[0];
}

}  // namespace

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

// target[places[i]] = or += the row sources[i] & 0xffffffff of the column bases[sources[i] >> 32].
struct nestpipe_moves {
  char* target;  // [num_rows, row_bytes]
  int64_t num_rows;
  int64_t row_bytes;
  const int64_t* places;  // [n]
  const int64_t* sources;  // [n]
  int64_t n;
  const char* const* bases;
};

}  // extern "C"

namespace {

struct Column {
  const void* start;
  int64_t row_bytes;
};

int64_t first_wrong(const nestpipe_rows& call) {
  int64_t i = first_wrong(call.slots, call.n, call.num_slots);
  while (i < call.n && call.slots[i] >= kNone && call.slots[i] < call.num_slots) ++i;
  return i;
}

// Calls move(target row, source row) for all, with the rows to come prefetched.
template <typename Move>
int64_t move_rows(const nestpipe_moves& moves, const Move& move) {
  const int64_t wrong = first_wrong(moves.places, moves.n, moves.num_rows);
  if (wrong < moves.n) return wrong;
  const auto from = [&moves](int64_t i) {
    return moves.bases[moves.sources[i] >> 32] + (moves.sources[i] & 0xffffffff) * moves.row_bytes;
  };
  for (int64_t i = 0; i < moves.n; ++i) {
    if (i + kAhead < moves.n) prefetch<0>(from(i + kAhead), moves.row_bytes);
    move(moves.target + moves.places[i] * moves.row_bytes, from(i));
  }
  return moves.n;
}

// The gradient of a place: given, or the sum of what arrived for it, the first being copied; valid until the next call of the
// thread.
const float* gradient(const nestpipe_rows& call, int64_t i) {
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
  nestpipe::share(call.n, call.num_threads, kMinShare, [&](int64_t begin, int64_t end) {
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

}  // namespace

extern "C" {

// out[i] = column[slots[i]], whatever a row of row_bytes holds.
int64_t nestpipe_rows_gather(const char* column, int64_t num_slots, int64_t row_bytes, const int64_t* slots, int64_t n,
                             char* out, int64_t num_threads) {
  const int64_t wrong = first_wrong(slots, n, num_slots);
  if (wrong < n) return wrong;
  nestpipe::share(n, num_threads, kMinShare, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch<0>(column + slots[i + kAhead] * row_bytes, row_bytes);
      copy_row(out + i * row_bytes, column + slots[i] * row_bytes, row_bytes);
    }
  });
  return n;
}

// column[slots[i]] = rows[i]; of equal slots the last one counts.
int64_t nestpipe_rows_scatter(char* column, int64_t num_slots, int64_t row_bytes, const int64_t* slots, int64_t n,
                              const char* rows) {
  const int64_t wrong = first_wrong(slots, n, num_slots);
  if (wrong < n) return wrong;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch<1>(column + slots[i + kAhead] * row_bytes, row_bytes);
    copy_row(column + slots[i] * row_bytes, rows + i * row_bytes, row_bytes);
  }
  return n;
}

// target[places[i]] += rows[i], one after the other.
int64_t nestpipe_rows_add(float* target, int64_t num_rows, int64_t dim, const int64_t* places, int64_t n,
                          const float* rows) {
  const int64_t wrong = first_wrong(places, n, num_rows);
  if (wrong < n) return wrong;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch<1>(target + places[i + kAhead] * dim, row_bytes);
    add_row(target + places[i] * dim, rows + i * dim, dim);
  }
  return n;
}

int64_t nestpipe_rows_copy_from(const nestpipe_moves* moves) {
  return move_rows(*moves, [moves](char* into, const char* from) { copy_row(into, from, moves->row_bytes); });
}

int64_t nestpipe_rows_add_from(const nestpipe_moves* moves) {
  const int64_t dim = moves->row_bytes / static_cast<int64_t>(sizeof(float));
  return move_rows(*moves, [dim](char* into, const char* from) {
    add_row(reinterpret_cast<float*>(into), reinterpret_cast<const float*>(from), dim);
  });
}

// The largest |value| of n, as bits without the sign, which ascend with the value; nan is above infinity.
uint32_t nestpipe_rows_largest(const float* values, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

// sums [n, dim] of rows that arrived, as an update adds them: see nestpipe_rows.
void nestpipe_rows_sum(float* sums, int64_t n, int64_t dim, const int64_t* starts, const float* const* rows) {
  nestpipe_rows call{};
  call.dim = dim, call.starts = starts, call.rows = rows;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch<0>(rows[starts[i + kAhead]], row_bytes);
    std::memcpy(sums + i * dim, gradient(call, i), row_bytes);
  }
}

int64_t nestpipe_rows_sgd(const nestpipe_rows* call) {
  const int64_t dim = call->dim;
  const float lr = call->lr, keep = call->keep;
  return update(*call, {}, [=](int64_t slot, const float* __restrict grads) {
    float* __restrict weights = call->weights + slot * dim;
    for (int64_t k = 0; k < dim; ++k) weights[k] = weights[k] * keep - grads[k] * lr;
  });
}

// sums [num_slots, dim].
int64_t nestpipe_rows_adagrad(const nestpipe_rows* call, float* sums, float eps) {
  const int64_t dim = call->dim;
  const float lr = call->lr, keep = call->keep;
  return update(*call, {{sums, dim * static_cast<int64_t>(sizeof(float))}}, [=](int64_t slot, const float* __restrict grads) {
    float* __restrict weights = call->weights + slot * dim;
    float* __restrict sum = sums + slot * dim;
    for (int64_t k = 0; k < dim; ++k) {
      const float grad = grads[k];
      sum[k] += grad * grad;
      weights[k] = weights[k] * keep - grad * lr / (std::sqrt(sum[k]) + eps);
    }
  });
}

// sums [num_slots, 1].
int64_t nestpipe_rows_rowwise_adagrad(const nestpipe_rows* call, float* sums, float eps) {
  const int64_t dim = call->dim;
  const float lr = call->lr, keep = call->keep;
  return update(*call, {{sums, sizeof(float)}}, [=](int64_t slot, const float* __restrict grads) {
    float* __restrict weights = call->weights + slot * dim;
    thread_local std::vector<float> squares;
    squares.resize(dim);
    for (int64_t k = 0; k < dim; ++k) squares[k] = grads[k] * grads[k];
    sums[slot] += fold(squares.data(), dim) / static_cast<float>(dim);
    const float denominator = std::sqrt(sums[slot]) + eps;
    for (int64_t k = 0; k < dim; ++k) weights[k] = weights[k] * keep - grads[k] * lr / denominator;
  });
}

// Adam's state and constants.
struct nestpipe_adam {
  float* mean;  // [num_slots, dim]
  float* square;  // [num_slots, dim]
  int32_t* step;  // [num_slots, 1]
  const float* corrections;  // [num_corrections, 2]: 1 - beta ** step for both betas
  int64_t num_corrections;
  float beta1, rest1;  // rest is 1 - beta
  float beta2, rest2;
  float eps;
};

// Returns -(the corrections needed) if there are too few of them; then nothing has changed.
int64_t nestpipe_rows_adam(const nestpipe_rows* call, const nestpipe_adam* adam) {
  const int64_t dim = call->dim, row_bytes = dim * static_cast<int64_t>(sizeof(float));
  const nestpipe_adam state = *adam;
  const int64_t wrong = first_wrong(*call);
  if (wrong < call->n) return wrong;
  int64_t needed = 0;
  for (int64_t i = 0; i < call->n; ++i) {
    if (call->slots[i] == kNone) continue;
    needed = std::max<int64_t>(needed, int64_t{state.step[call->slots[i]]} + 2);
  }
  if (needed > state.num_corrections) return -needed;
  const float lr = call->lr, keep = call->keep;
  return update(
      *call, {{state.mean, row_bytes}, {state.square, row_bytes}}, [=](int64_t slot, const float* __restrict grads) {
        float* __restrict weights = call->weights + slot * dim;
        float* __restrict mean = state.mean + slot * dim;
        float* __restrict square = state.square + slot * dim;
        const float* corrections = state.corrections + 2 * static_cast<int64_t>(++state.step[slot]);
        const float first = corrections[0], second = corrections[1];
        for (int64_t k = 0; k < dim; ++k) {
          const float grad = grads[k];
          mean[k] = mean[k] * state.beta1 + grad * state.rest1;
          square[k] = square[k] * state.beta2 + grad * grad * state.rest2;
          const float denominator = std::sqrt(square[k] / second) + state.eps;
          weights[k] = weights[k] * keep - mean[k] / first * lr / denominator;
        }
      });
}

}  // extern "C"
