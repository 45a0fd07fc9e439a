// One batch more in the series of rows that Adam updates without gradients: `Entries.advance` of embedding/adam_series.py, bitwise.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kOrder = 8, kShort = 4;  // as in adam.cpp
constexpr int kNum = 2 + kOrder + 1 + kShort;  // rows of a state: centre, keep, and the sums D and E

}  // namespace

extern "C" {

struct nestpipe_series_step {
  const double* from;  // [kNum, num_from], of which the entries `begin` .. num_from continue
  int64_t num_from;
  int64_t begin;
  double* to;  // [kNum, num_from - begin + 1]: they and a new one
  double centre;  // of the new one
  const double* powers1;  // [>= step + 1] of beta1
  const double* powers2;
  int64_t step;  // that is made
  double lr;
  double keep;  // what weight decay leaves of a weight
  int64_t decays;  // whether there is weight decay
};

void nestpipe_adam_series_advance(const nestpipe_series_step* call) {
  const nestpipe_series_step one = *call;
  const int64_t num = one.num_from - one.begin, n = num + 1;
  for (int j = 0; j < kNum; ++j) {
    std::memcpy(one.to + j * n, one.from + j * one.num_from + one.begin, num * sizeof(double));
    one.to[j * n + num] = j == 0 ? one.centre : j == 1 ? 1.0 : 0.0;
  }
  double *centre = one.to, *kept = one.to + n, *sums = one.to + 2 * n;
  if (one.decays) {
    for (int64_t i = 0; i < (kNum - 1) * n; ++i) kept[i] *= one.keep;
  }
  const double rest1 = 1 - one.powers1[one.step], rest2 = 1 - one.powers2[one.step];
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const int64_t missed = n - i;  // steps, this one included
    const double q = std::sqrt(one.powers2[missed] / rest2);
    const double z = (q - centre[i]) / (q + centre[i]);
    const double moved = one.lr * one.powers1[missed] / rest1;
    double term = moved * (1 - z);
    for (int j = 0; j <= kOrder; ++j, term *= z) sums[j * n + i] += term;
    term = moved;
    for (int j = kOrder + 1; j <= kOrder + kShort; ++j) sums[j * n + i] += (term /= q);
  }
}

}  // extern "C"
