// Rows by slot: copies, sums and optimizer updates in place.
//
// Columns are [num_slots, D] and dense. Every element is computed by exactly rounded operations in one fixed order (no
// fused multiply-add: see the flags in native_library.py), so it is bitwise independent of its neighbours and of vector
// boundaries, and bitwise identical to the same operations in torch (row_optimizer.py). Threads divide the places of a call;
// its slots are distinct wherever several threads write rows.
//
// Random access is bound by memory latency, so every loop prefetches the row kAhead ahead. A function that takes
// slots returns n, or the place of the first slot that does not exist; then nothing has changed.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "rows.h"

namespace {

using namespace nestpipe;

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

}  // extern "C"
