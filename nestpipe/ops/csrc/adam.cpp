// Adam on rows: lazy (a row counts its own steps), and exact, where a row that is read or updated first makes the steps of
// the batches that did not look it up (embedding/skipped_steps.py has the formulas, embedding/catch_up.py the same in torch).
//
// As in rows.cpp, every element is computed by exactly rounded operations in one fixed order.

#include <cmath>
#include <cstdint>
#include <vector>

#include "rows.h"

namespace {

using namespace nestpipe;

constexpr int kOrder = 8;  // of the series; ORDER in skipped_steps.py
constexpr int64_t kEntry = kOrder + 3;  // centre, keep, coefficients

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

// All steps at once, by the series. Wide vectors: the polynomial costs more than root and division.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target("prefer-vector-width=512")))
#endif
void jump(const float* __restrict entry, float eps, int64_t dim, const float* __restrict mean,
          const float* __restrict square, float* __restrict weights) {
  const float centre = entry[0], keep = entry[1];
  const float* coefficients = entry + 2;
  for (int64_t k = 0; k < dim; ++k) {
    const float scaled = std::sqrt(square[k]) * centre;
    const float inverse = 1.0f / (scaled + eps);
    const float ratio = (eps - scaled) * inverse;
    float sum = coefficients[kOrder];
    for (int j = kOrder - 1; j >= 0; --j) sum = sum * ratio + coefficients[j];
    weights[k] = weights[k] * keep - mean[k] * (sum * inverse);
  }
}

// Weights of a row as of `missed.step`, in place; `seen` are the batches that it has seen.
void catch_up(const nestpipe_missed& missed, const nestpipe_adam& adam, int64_t seen, int64_t dim, const float* mean,
              const float* square, float* weights) {
  if (seen >= missed.step) return;
  if (seen == 0) {  // never had a gradient: it has only decayed
    if (!missed.decays) return;
    for (int64_t i = 0; i < std::min(missed.step, missed.horizon); ++i) {
      for (int64_t k = 0; k < dim; ++k) weights[k] *= missed.keeps[i];
    }
  } else if (seen < missed.first_series) {
    walk(missed, adam, seen, dim, mean, square, weights);
  } else {
    const bool is_settled = seen < missed.num_settled;
    const float* entry = is_settled ? missed.settled + seen * kEntry : missed.recent + (seen - missed.num_settled) * kEntry;
    jump(entry, adam.eps, dim, mean, square, weights);
  }
  if (missed.decays && seen < missed.num_settled) {
    for (int64_t k = 0; k < dim; ++k) weights[k] *= missed.late[seen];
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
  return update(*call, {{state.mean, row_bytes}, {state.square, row_bytes}}, [=](int64_t slot, const float* grads) {
    float *__restrict mean = state.mean + slot * dim, *__restrict square = state.square + slot * dim;
    const int64_t seen = state.step[slot];
    if (seen < missed->step) {
      catch_up(*missed, state, seen, dim, mean, square, call->weights + slot * dim);
      const float* powers = missed->powers + 2 * (missed->step - seen);
      const float first = powers[0], second = powers[1];
      for (int64_t k = 0; k < dim; ++k) mean[k] *= first, square[k] *= second;
    }
    step_row(*call, state, slot, missed->step + 1, grads);
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
      float* row = out + i * dim;
      copy_row(reinterpret_cast<char*>(row), reinterpret_cast<const char*>(call->weights + slot * dim), row_bytes);
      catch_up(*missed, *adam, adam->step[slot], dim, adam->mean + slot * dim, adam->square + slot * dim, row);
    }
  });
  return call->n;
}

}  // extern "C"
