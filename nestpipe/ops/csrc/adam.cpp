// Adam on rows: lazy (a row counts its own steps), and exact, where a row that is read or updated first makes the steps of
// the batches that did not look it up (embedding/skipped_steps.py and adam_series.py have the formulas, row_adam.py the same in torch).
//
// As in rows.cpp, every element is computed by exactly rounded operations in one fixed order.

#include <cmath>
#include <cstdint>
#include <vector>

#include "rows.h"

namespace {

using namespace nestpipe;

constexpr int kOrder = 8;  // of the series; ORDER in adam_series.py
constexpr int kShort = 4;  // terms of the short series
constexpr int64_t kEntry = 2 + kOrder + 1 + kShort;  // centre, keep, coefficients of both

}  // namespace

extern "C" {

// Adam's state and constants.
struct nestpipe_adam {
  float* mean;  // [num_slots, dim]
  float* square;  // [num_slots, dim]
  int32_t* step;  // [num_slots, 1]: of a lazy row its own steps, of an exact one the batches that it has seen
  const float* corrections;  // [num_corrections, 2]: 1 - beta ** step for both betas
  int64_t num_corrections;
  float beta1, rest1;  // rest is 1 - beta
  float beta2, rest2;
  float eps;
};

// What rows with a given number of batches have missed before `step`.
struct nestpipe_missed {
  int64_t step;
  const float* settled;  // [num_settled, kEntry], by the batches that a row has seen
  int64_t num_settled;
  const float* recent;  // [step - num_settled, kEntry], of those after
  const float* late;  // [num_settled] if there is weight decay: what it leaves after the horizon
  int64_t decays;  // whether there is weight decay
  const float* rates;  // [step]
  const float* keeps;  // [step]
  const float* powers;  // [step + 1, 2]: beta ** number of steps for both betas
  int64_t horizon;  // steps after which a row without gradients does not move
  int64_t first_series;  // fewer batches than these: step by step
  float short_square;  // second moments from this on: the short series
};

}  // extern "C"

namespace {

// The steps one by one, each like an update with a zero gradient.
void walk(const nestpipe_missed& missed, const nestpipe_adam& adam, int64_t seen, int64_t dim, const float* mean,
          const float* square, float* weights) {
  const int64_t last = std::min(missed.step, seen + missed.horizon);
  thread_local std::vector<float> means, squares;
  means.assign(mean, mean + dim), squares.assign(square, square + dim);
  float *__restrict m = means.data(), *__restrict v = squares.data(), *__restrict w = weights;
  for (int64_t i = seen; i < last; ++i) {
    const float lr = missed.rates[i], keep = missed.keeps[i];
    const float first = adam.corrections[2 * (i + 1)], second = adam.corrections[2 * (i + 1) + 1];
    for (int64_t k = 0; k < dim; ++k) {
      m[k] *= adam.beta1;
      v[k] *= adam.beta2;
      w[k] = w[k] * keep - m[k] / first * lr / (std::sqrt(v[k] / second) + adam.eps);
    }
  }
}

// Wide vectors: the series cost more than root and division. Not inlined: compilers then forget that rows do not overlap.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((noinline, target("prefer-vector-width=512")))
#else
#define WIDE __attribute__((noinline))
#endif

// The sum of coefficients[j] * at ** j for j < kNum.
template <int kNum>
inline float polynomial(const float* coefficients, float at) {
  float sum = coefficients[kNum - 1];
  for (int j = kNum - 2; j >= 0; --j) sum = sum * at + coefficients[j];
  return sum;
}

// How far a weight moves per unit of its mean. kIsShort: the second moment is known to be large enough for the short series.
template <bool kIsShort>
inline float movement(const float* entry, float eps, float short_square, float square) {
  const float root = std::sqrt(square), inverse = 1.0f / root;
  const float part = polynomial<kShort>(entry + 2 + kOrder + 1, inverse * -eps) * inverse;
  if (kIsShort) return part;
  const float scaled = root * entry[0], below = 1.0f / (scaled + eps);
  const float whole = polynomial<kOrder + 1>(entry + 2, (eps - scaled) * below) * below;
  return square < short_square ? whole : part;
}

WIDE bool all_short(const float* __restrict square, int64_t dim, float short_square) {
  int is_below = 0;
  for (int64_t k = 0; k < dim; ++k) is_below |= square[k] < short_square;
  return !is_below;
}

// The steps that a row has missed.
struct Gap {
  const float* entry;  // of the series; null: step by step
  float late;  // what weight decay leaves after the horizon

  Gap(const nestpipe_missed& missed, int64_t seen)
      : entry(nullptr), late(missed.decays && seen < missed.num_settled ? missed.late[seen] : 1.0f) {
    if (seen == 0 || seen < missed.first_series || seen >= missed.step) return;
    const bool is_settled = seen < missed.num_settled;
    entry = is_settled ? missed.settled + seen * kEntry : missed.recent + (seen - missed.num_settled) * kEntry;
  }
};

// All steps at once, by the series.
template <bool kIsShort>
WIDE void jump(const Gap& gap, float short_square, float eps, int64_t dim, const float* __restrict mean,
               const float* __restrict square, const float* __restrict from, float* __restrict to) {
  const float* __restrict entry = gap.entry;
  const float keep = entry[1], late = gap.late;
  for (int64_t k = 0; k < dim; ++k) {
    to[k] = (from[k] * keep - mean[k] * movement<kIsShort>(entry, eps, short_square, square[k])) * late;
  }
}

// Step by step, in place: a row of the first batches, or one that never had a gradient and has only decayed.
void walk(const nestpipe_missed& missed, const nestpipe_adam& adam, const Gap& gap, int64_t seen, int64_t dim,
          const float* mean, const float* square, float* weights) {
  if (seen >= missed.step) return;
  if (seen > 0) {
    walk(missed, adam, seen, dim, mean, square, weights);
  } else if (missed.decays) {
    for (int64_t i = 0; i < std::min(missed.step, missed.horizon); ++i) {
      for (int64_t k = 0; k < dim; ++k) weights[k] *= missed.keeps[i];
    }
  }
  for (int64_t k = 0; k < dim; ++k) weights[k] *= gap.late;
}

// `to` = the weights `from` as of `missed.step`; `seen` are the batches that the row has seen.
void catch_up(const nestpipe_missed& missed, const nestpipe_adam& adam, int64_t seen, int64_t dim, const float* mean,
              const float* square, const float* from, float* to) {
  const Gap gap(missed, seen);
  if (gap.entry == nullptr) {
    std::memcpy(to, from, dim * sizeof(float));
    walk(missed, adam, gap, seen, dim, mean, square, to);
  } else if (all_short(square, dim, missed.short_square)) {
    jump<true>(gap, missed.short_square, adam.eps, dim, mean, square, from, to);
  } else {
    jump<false>(gap, missed.short_square, adam.eps, dim, mean, square, from, to);
  }
}

void step_row(const nestpipe_rows& call, const nestpipe_adam& adam, int64_t slot, int64_t step,
              const float* __restrict grads) {
  const int64_t dim = call.dim;
  const float lr = call.lr, keep = call.keep;
  float* __restrict weights = call.weights + slot * dim;
  float* __restrict mean = adam.mean + slot * dim;
  float* __restrict square = adam.square + slot * dim;
  const float first = adam.corrections[2 * step], second = adam.corrections[2 * step + 1];
  for (int64_t k = 0; k < dim; ++k) {
    const float grad = grads[k];
    mean[k] = mean[k] * adam.beta1 + grad * adam.rest1;
    square[k] = square[k] * adam.beta2 + grad * grad * adam.rest2;
    const float denominator = std::sqrt(square[k] / second) + adam.eps;
    weights[k] = weights[k] * keep - mean[k] / first * lr / denominator;
  }
}

// `jump` and `step_row` in one pass; `powers` are those of the betas over the gap.
template <bool kIsShort>
WIDE void jump_and_step(const nestpipe_rows& call, const nestpipe_adam& adam, const nestpipe_missed& missed,
                        const Gap& gap, const float* powers, int64_t slot, const float* __restrict grads) {
  const int64_t dim = call.dim, step = missed.step + 1;
  const float* __restrict entry = gap.entry;
  const float lr = call.lr, keep = call.keep, kept = entry[1], late = gap.late, eps = adam.eps;
  const float beta1 = adam.beta1, rest1 = adam.rest1, beta2 = adam.beta2, rest2 = adam.rest2;
  const float first = adam.corrections[2 * step], second = adam.corrections[2 * step + 1];
  const float power1 = powers[0], power2 = powers[1], short_square = missed.short_square;
  float* __restrict weights = call.weights + slot * dim;
  float* __restrict means = adam.mean + slot * dim;
  float* __restrict squares = adam.square + slot * dim;
  for (int64_t k = 0; k < dim; ++k) {
    const float grad = grads[k];
    const float moved = means[k] * movement<kIsShort>(entry, eps, short_square, squares[k]);
    const float weight = (weights[k] * kept - moved) * late;
    const float mean = means[k] * power1 * beta1 + grad * rest1;
    const float square = squares[k] * power2 * beta2 + grad * grad * rest2;
    means[k] = mean, squares[k] = square;
    weights[k] = weight * keep - mean / first * lr / (std::sqrt(square / second) + eps);
  }
}

}  // namespace

extern "C" {

// Returns -(the corrections needed) if there are too few of them; then nothing has changed.
int64_t nestpipe_rows_lazy_adam(const nestpipe_rows* call, const nestpipe_adam* adam) {
  const int64_t row_bytes = call->dim * static_cast<int64_t>(sizeof(float));
  const nestpipe_adam state = *adam;
  const int64_t wrong = first_wrong(*call);
  if (wrong < call->n) return wrong;
  int64_t needed = 0;
  for (int64_t i = 0; i < call->n; ++i) {
    if (call->slots[i] == kNone) continue;
    needed = std::max<int64_t>(needed, int64_t{state.step[call->slots[i]]} + 2);
  }
  if (needed > state.num_corrections) return -needed;
  return update(*call, {{state.mean, row_bytes}, {state.square, row_bytes}}, [=](int64_t slot, const float* grads) {
    step_row(*call, state, slot, ++state.step[slot], grads);
  });
}

// Catches up to `missed->step`, then makes the step of a batch.
int64_t nestpipe_rows_adam(const nestpipe_rows* call, const nestpipe_adam* adam, const nestpipe_missed* missed) {
  const int64_t dim = call->dim, row_bytes = dim * static_cast<int64_t>(sizeof(float));
  const nestpipe_adam state = *adam;
  const std::initializer_list<Column> others = {
      {state.mean, row_bytes}, {state.square, row_bytes}, {state.step, sizeof(int32_t)}};
  return update(*call, others, [=](int64_t slot, const float* grads) {
    float *__restrict mean = state.mean + slot * dim, *__restrict square = state.square + slot * dim;
    const int64_t seen = state.step[slot];
    const float* powers = missed->powers + 2 * std::max<int64_t>(missed->step - seen, 0);
    const Gap gap(*missed, seen);
    if (gap.entry == nullptr) {
      walk(*missed, state, gap, seen, dim, mean, square, call->weights + slot * dim);
      for (int64_t k = 0; k < dim; ++k) mean[k] *= powers[0], square[k] *= powers[1];
      step_row(*call, state, slot, missed->step + 1, grads);
    } else if (all_short(square, dim, missed->short_square)) {
      jump_and_step<true>(*call, state, *missed, gap, powers, slot, grads);
    } else {
      jump_and_step<false>(*call, state, *missed, gap, powers, slot, grads);
    }
    state.step[slot] = static_cast<int32_t>(missed->step + 1);
  });
}

// out[i] = the weights of slots[i] as of `missed->step`; slots may repeat, and nothing else changes.
int64_t nestpipe_rows_adam_gather(const nestpipe_rows* call, const nestpipe_adam* adam, const nestpipe_missed* missed,
                                  float* out) {
  const int64_t dim = call->dim, row_bytes = dim * static_cast<int64_t>(sizeof(float));
  const int64_t wrong = first_wrong(call->slots, call->n, call->num_slots);
  if (wrong < call->n) return wrong;
  share(call->n, call->num_threads, kMinShare, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + 2 * kAhead < end) __builtin_prefetch(adam->step + call->slots[i + 2 * kAhead]);
      if (i + kAhead < end) {
        const int64_t next = call->slots[i + kAhead], seen = adam->step[next];
        prefetch<0>(call->weights + next * dim, row_bytes);
        if (seen != 0 && seen < missed->step) {
          prefetch<0>(adam->mean + next * dim, row_bytes);
          prefetch<0>(adam->square + next * dim, row_bytes);
        }
      }
      const int64_t slot = call->slots[i];
      const float *mean = adam->mean + slot * dim, *square = adam->square + slot * dim;
      catch_up(*missed, *adam, adam->step[slot], dim, mean, square, call->weights + slot * dim, out + i * dim);
    }
  });
  return call->n;
}

}  // extern "C"
