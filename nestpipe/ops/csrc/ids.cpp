// Ids of a batch: deduplication, grouping by owner, and owners.
//
// Every int64 is a legal id, and results are functions of the arguments alone. No function throws: one that can run out of
// memory returns kFailed.

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <vector>

#include "hash.h"

namespace {

constexpr int64_t kFailed = -1;
constexpr uint64_t kBitsPerId = 256;  // a bitmap of so many bits per id is still cheaper than sorting
constexpr int kSpareBits = 3;  // sorted bits beyond log2(n); they distinguish most ids
constexpr int kDigitBits = 9;  // at most; the pages that a pass writes must stay in the TLB

// Dense ids: a bitmap, and the number of ids before each of its words.
int64_t dedupe_close(const int64_t* ids, int64_t n, int64_t low, uint64_t range, int64_t* unique, int64_t* inverse) {
  struct Word {
    uint64_t bits;
    int64_t before;
  };
  std::vector<Word> words(range / 64 + 1, Word{0, 0});
  const auto shifted = [ids, low](int64_t i) { return static_cast<uint64_t>(ids[i]) - static_cast<uint64_t>(low); };
  for (int64_t i = 0; i < n; ++i) words[shifted(i) >> 6].bits |= uint64_t{1} << (shifted(i) & 63);
  int64_t num_unique = 0;
  for (Word& word : words) {
    word.before = num_unique;
    num_unique += __builtin_popcountll(word.bits);
  }
  for (int64_t i = 0; i < n; ++i) {
    const Word& word = words[shifted(i) >> 6];
    const uint64_t lower = word.bits & ((uint64_t{1} << (shifted(i) & 63)) - 1);
    inverse[i] = word.before + __builtin_popcountll(lower);
    unique[inverse[i]] = ids[i];
  }
  return num_unique;
}

struct Keyed {
  uint64_t key;  // ascends as the ids do
  int64_t place;
};

int width_of(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

// Sorts n rows by the `num_bits` bits of their keys above `shift`, digit by digit from the lowest.
void sort_by_bits(std::unique_ptr<Keyed[]>& rows, int64_t n, int shift, int num_bits) {
  const int num_digits = (num_bits + kDigitBits - 1) / kDigitBits;
  const int digit_bits = (num_bits + num_digits - 1) / num_digits;
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  const auto digit = [=](uint64_t key, int d) { return (key >> (shift + d * digit_bits)) & mask; };
  std::vector<std::array<int64_t, 1 << kDigitBits>> starts(num_digits);  // zero
  for (int64_t i = 0; i < n; ++i) {
    for (int d = 0; d < num_digits; ++d) ++starts[d][digit(rows[i].key, d)];
  }
  std::unique_ptr<Keyed[]> sorted(new Keyed[n]);
  for (int d = 0; d < num_digits; ++d) {
    std::exclusive_scan(starts[d].begin(), starts[d].end(), starts[d].begin(), int64_t{0});
    for (int64_t i = 0; i < n; ++i) sorted[starts[d][digit(rows[i].key, d)]++] = rows[i];
    rows.swap(sorted);
  }
}

// Sparse ids: radix sort by the upper bits that distinguish most of n, then sort the few that agree in them.
int64_t dedupe_spread(const int64_t* ids, int64_t n, int64_t low, uint64_t range, int64_t* unique, int64_t* inverse) {
  std::unique_ptr<Keyed[]> rows(new Keyed[n]);
  for (int64_t i = 0; i < n; ++i) rows[i] = {static_cast<uint64_t>(ids[i]) - static_cast<uint64_t>(low), i};
  const int width = width_of(range), upper = std::min(width, width_of(n) + kSpareBits), shift = width - upper;
  sort_by_bits(rows, n, shift, upper);
  const auto before = [](const Keyed& one, const Keyed& other) { return one.key < other.key; };
  for (int64_t begin = 0, end; shift > 0 && begin < n; begin = end) {
    for (end = begin + 1; end < n && rows[end].key >> shift == rows[begin].key >> shift;) ++end;
    if (!std::is_sorted(&rows[begin], &rows[end], before)) std::sort(&rows[begin], &rows[end], before);
  }
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (i == 0 || rows[i].key != rows[i - 1].key) unique[++last] = ids[rows[i].place];
    inverse[rows[i].place] = last;
  }
  return last + 1;
}

}  // namespace

extern "C" {

// Writes the distinct ids, ascending, and for each id its place among them; returns how many are distinct. Both outputs
// have room for n.
int64_t nestpipe_ids_dedupe(const int64_t* ids, int64_t n, int64_t* unique, int64_t* inverse) {
  if (n == 0) return 0;
  const int64_t low = *std::min_element(ids, ids + n), high = *std::max_element(ids, ids + n);
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  try {
    if (range / kBitsPerId < static_cast<uint64_t>(n)) return dedupe_close(ids, n, low, range, unique, inverse);
    return dedupe_spread(ids, n, low, range, unique, inverse);
  } catch (const std::exception&) {  // std::bad_alloc
    return kFailed;
  }
}

// Writes the places of group 0, then of group 1, ...; those of one group ascending. `counts` [num_groups] gets their
// sizes. Returns n, or the place of the first invalid group.
int64_t nestpipe_ids_group(const int64_t* groups, int64_t n, int64_t num_groups, int64_t* order, int64_t* counts) {
  std::fill_n(counts, num_groups, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (groups[i] < 0 || groups[i] >= num_groups) return i;
    ++counts[groups[i]];
  }
  try {
    std::vector<int64_t> next(counts, counts + num_groups);
    std::exclusive_scan(next.begin(), next.end(), next.begin(), int64_t{0});
    for (int64_t i = 0; i < n; ++i) order[next[groups[i]]++] = i;
  } catch (const std::exception&) {
    return kFailed;
  }
  return n;
}

// The bucket of each id, and from it the rank that owns it; with as many ranks as buckets, the bucket itself.
void nestpipe_ids_owner(const int64_t* ids, int64_t n, int64_t num_buckets, int64_t world_size, int64_t* owner) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bucket = nestpipe::bucket_of(ids[i], num_buckets);
    owner[i] = world_size == num_buckets ? bucket : bucket * world_size / num_buckets;
  }
}

// Which of n ids are among m others; both ascend without repeats.
void nestpipe_ids_among(const int64_t* ids, int64_t n, const int64_t* others, int64_t m, uint8_t* found) {
  for (int64_t i = 0, j = 0; i < n; ++i) {
    while (j < m && others[j] < ids[i]) ++j;
    found[i] = j < m && others[j] == ids[i];
  }
}

}  // extern "C"
