// Ids of a batch: the distinct ones with their places, groups in order, owners.
//
// No id is special and nothing is measured, so the answers are functions of the arguments alone. No function throws: one
// that can run out of memory returns kFailed.

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
constexpr int64_t kWindow = 16;  // ids ahead for which memory is prefetched
constexpr uint64_t kIdsPerBit = 256;  // a bitmap of so many bits per id is still cheaper than hashing
constexpr uint64_t kSign = uint64_t{1} << 63;
constexpr int kDigitBits = 11;
constexpr int kNumDigits = 6;  // 6 x 11 >= 64
constexpr uint64_t kDigits = uint64_t{1} << kDigitBits;

// Ids that lie close together: a bitmap, and how many ids there are before each of its words.
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

struct Numbered {
  uint64_t key;  // ascends as the ids do
  int64_t number;
};

// Sorts by key, digit by digit from the lowest; digits in which all keys agree cost nothing.
void sort_numbered(std::vector<Numbered>& rows) {
  const auto digit = [](uint64_t key, int d) { return (key >> (d * kDigitBits)) & (kDigits - 1); };
  std::vector<std::array<int64_t, kDigits>> starts(kNumDigits);  // zero
  for (const Numbered& row : rows) {
    for (int d = 0; d < kNumDigits; ++d) ++starts[d][digit(row.key, d)];
  }
  std::vector<Numbered> sorted(rows.size());
  for (int d = 0; d < kNumDigits; ++d) {
    if (starts[d][digit(rows[0].key, d)] == static_cast<int64_t>(rows.size())) continue;
    std::exclusive_scan(starts[d].begin(), starts[d].end(), starts[d].begin(), int64_t{0});
    for (const Numbered& row : rows) sorted[starts[d][digit(row.key, d)]++] = row;
    rows.swap(sorted);
  }
}

// Ids anywhere: a hash table numbers them as they appear, and only the distinct ones are sorted.
int64_t dedupe_spread(const int64_t* ids, int64_t n, int64_t* unique, int64_t* inverse) {
  uint64_t capacity = 64;
  while (capacity < 2 * static_cast<uint64_t>(n)) capacity *= 2;
  const uint64_t mask = capacity - 1;
  struct Entry {
    int64_t id;
    int64_t number;
  };
  std::vector<Entry> entries(capacity, Entry{0, -1});
  const auto home = [mask](int64_t id) { return nestpipe::mix64(static_cast<uint64_t>(id)) & mask; };
  std::vector<Numbered> rows;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kWindow < n) __builtin_prefetch(&entries[home(ids[i + kWindow])], 1);
    uint64_t place = home(ids[i]);
    while (entries[place].number >= 0 && entries[place].id != ids[i]) place = (place + 1) & mask;
    if (entries[place].number < 0) {
      entries[place] = {ids[i], static_cast<int64_t>(rows.size())};
      rows.push_back({static_cast<uint64_t>(ids[i]) ^ kSign, entries[place].number});
    }
    inverse[i] = entries[place].number;
  }
  sort_numbered(rows);
  std::vector<int64_t> rank(rows.size());
  for (uint64_t k = 0; k < rows.size(); ++k) {
    unique[k] = static_cast<int64_t>(rows[k].key ^ kSign);
    rank[rows[k].number] = static_cast<int64_t>(k);
  }
  for (int64_t i = 0; i < n; ++i) inverse[i] = rank[inverse[i]];
  return static_cast<int64_t>(rows.size());
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
    if (range / kIdsPerBit < static_cast<uint64_t>(n)) return dedupe_close(ids, n, low, range, unique, inverse);
    return dedupe_spread(ids, n, unique, inverse);
  } catch (const std::exception&) {  // std::bad_alloc
    return kFailed;
  }
}

// Writes the places of group 0, then of group 1, ...; those of one group ascending. `counts` [num_groups] gets their
// sizes. Returns n, or the place of the first group that is none.
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

// The bucket of each id, as in owner.py, and from it the rank that owns it.
void nestpipe_ids_owner(const int64_t* ids, int64_t n, int64_t num_buckets, int64_t world_size, int64_t* owner) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t upper = nestpipe::mix64(static_cast<uint64_t>(ids[i])) >> 32;
    const int64_t bucket = static_cast<int64_t>((upper * static_cast<uint64_t>(num_buckets)) >> 32);
    owner[i] = bucket * world_size / num_buckets;
  }
}

}  // extern "C"
