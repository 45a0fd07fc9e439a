// Who needs which rows in a window: the asker's plan, and what an owner makes of the requests of all askers.
//
// A window is parts 0 .. P-1; ids are those of all parts, back to back. Its distinct ids stand at *places*, sorted by
// (owner, first part, eighth of the owner's buckets, id). The rows of one part, its *leaf*, are those of its distinct ids in
// the order of their places.
// Answers are functions of the arguments alone. No function throws: one that runs out of memory returns kFailed.

#include <cstdint>
#include <exception>
#include <numeric>
#include <vector>

#include "hash.h"

extern "C" {

int64_t nestpipe_ids_dedupe(const int64_t* ids, int64_t n, int64_t* unique, int64_t* inverse);  // ids.cpp

// What is asked for, and where the answers go. Counts are [owner][part].
struct nestpipe_plan {
  const int64_t* ids;  // [n]
  const int64_t* part_ends;  // [num_parts]: where the ids of each part end
  int64_t n;
  int64_t num_parts;
  int64_t num_buckets;
  int64_t world_size;
  int64_t* unique;  // room for n: the distinct ids, place by place
  uint8_t* last_part;  // room for n: of each place
  uint8_t* eighths;  // room for n: of each place
  int64_t* index;  // [n]: where the id's row is in the leaf of its part
  int64_t* again;  // room for n: leaf positions of rows that an earlier part has, part after part
  int64_t* source;  // room for n: the part that had each of them last, << 32, and its position there
  int64_t* leaving;  // room for n: leaf positions of rows that no later part has, part after part
  int64_t* first_counts;  // places whose first part it is
  int64_t* last_counts;  // places whose last part it is
  int64_t* leaf_counts;  // places in the leaf
};

}  // extern "C"

namespace {

constexpr int64_t kFailed = -1;
constexpr int kWordBits = 64;
constexpr int64_t kEighths = 8;

// Sets [0, n) with the rank of each member.
class Ranked {
 public:
  explicit Ranked(int64_t n) : bits_(n / kWordBits + 1), before_(n / kWordBits + 1) {}

  void clear() { bits_.assign(bits_.size(), 0); }
  void insert(int64_t i) { bits_[i / kWordBits] |= uint64_t{1} << (i % kWordBits); }
  int64_t rank(int64_t i) const {
    const uint64_t lower = bits_[i / kWordBits] & ((uint64_t{1} << (i % kWordBits)) - 1);
    return before_[i / kWordBits] + __builtin_popcountll(lower);
  }

  // Calls member(i, rank of i) for all, ascending.
  template <typename Member>
  void rank_all(const Member& member) {
    int64_t number = 0;
    for (size_t word = 0; word < bits_.size(); ++word) {
      before_[word] = number;
      for (uint64_t rest = bits_[word]; rest != 0; rest &= rest - 1) {
        member(static_cast<int64_t>(word) * kWordBits + __builtin_ctzll(rest), number++);
      }
    }
  }

 private:
  std::vector<uint64_t> bits_;
  std::vector<int64_t> before_;
};

int64_t owner_of(int64_t id, int64_t num_buckets, int64_t world_size) {
  const uint64_t upper = nestpipe::mix64(static_cast<uint64_t>(id)) >> 32;
  return static_cast<int64_t>((upper * static_cast<uint64_t>(num_buckets)) >> 32) * world_size / num_buckets;
}

// Sorts [0, n) by key(i), which is below num_keys, stably: calls placed(i, place). Adds the sizes to counts.
template <typename Key, typename Placed>
void sort_by(int64_t n, int64_t num_keys, int64_t* counts, const Key& key, const Placed& placed) {
  for (int64_t i = 0; i < n; ++i) ++counts[key(i)];
  std::vector<int64_t> next(num_keys);
  std::exclusive_scan(counts, counts + num_keys, next.begin(), int64_t{0});
  for (int64_t i = 0; i < n; ++i) placed(i, next[key(i)]++);
}

int64_t make_plan(const nestpipe_plan& plan) {
  const int64_t n = plan.n, parts = plan.num_parts, ranks = plan.world_size;
  std::vector<int64_t> ids(n), place_of(n);  // the distinct ids, ascending; first their numbers, then their places
  const int64_t num_unique = nestpipe_ids_dedupe(plan.ids, n, ids.data(), plan.index);
  if (num_unique < 0) return kFailed;
  std::vector<int64_t> first(num_unique, parts), eighth(num_unique);
  std::vector<uint8_t> last(num_unique);
  for (int64_t part = 0, i = 0; part < parts; ++part) {
    for (; i < plan.part_ends[part]; ++i) {
      const int64_t number = plan.index[i];
      if (first[number] == parts) first[number] = part;
      last[number] = static_cast<uint8_t>(part);
    }
  }
  for (int64_t u = 0; u < num_unique; ++u) eighth[u] = owner_of(ids[u], plan.num_buckets, ranks * kEighths);
  std::vector<int64_t> first_of(num_unique), owner_of_place(num_unique), counts(ranks * parts * kEighths);
  const auto key = [&](int64_t u) {
    return (eighth[u] / kEighths * parts + first[u]) * kEighths + eighth[u] % kEighths;
  };
  sort_by(num_unique, ranks * parts * kEighths, counts.data(), key, [&](int64_t u, int64_t place) {
    place_of[u] = place;
    plan.unique[place] = ids[u];
    plan.last_part[place] = last[u];
    first_of[place] = first[u];
    owner_of_place[place] = eighth[u] / kEighths;
    plan.eighths[place] = static_cast<uint8_t>(eighth[u] % kEighths);
  });
  for (size_t i = 0; i < counts.size(); ++i) plan.first_counts[i / kEighths] += counts[i];
  Ranked members(num_unique);
  std::vector<int64_t> seen(num_unique);  // where each place was last
  int64_t num_again = 0, num_leaving = 0;
  for (int64_t part = 0, begin = 0; part < parts; begin = plan.part_ends[part++]) {
    members.clear();
    for (int64_t i = begin; i < plan.part_ends[part]; ++i) {
      plan.index[i] = place_of[plan.index[i]];
      members.insert(plan.index[i]);
    }
    members.rank_all([&](int64_t place, int64_t position) {
      if (first_of[place] < part) {
        plan.again[num_again] = position;
        plan.source[num_again++] = seen[place];
      }
      if (plan.last_part[place] == part) {
        plan.leaving[num_leaving++] = position;
        ++plan.last_counts[owner_of_place[place] * parts + part];
      }
      seen[place] = part << 32 | position;
      ++plan.leaf_counts[owner_of_place[place] * parts + part];
    });
    for (int64_t i = begin; i < plan.part_ends[part]; ++i) plan.index[i] = members.rank(plan.index[i]);
  }
  return num_unique;
}

}  // namespace

extern "C" {

// Fills in the plan, whose counts are zero; returns the number of distinct ids.
int64_t nestpipe_plan_make(const nestpipe_plan* plan) {
  try {
    return make_plan(*plan);
  } catch (const std::exception&) {  // std::bad_alloc
    return kFailed;
  }
}

// What the owner of a table is asked for. Requests are ids with the last part of each, asker after asker.
struct nestpipe_requests {
  const int64_t* ids;  // [n]
  const uint8_t* last_part;  // [n]
  const int64_t* asker_ends;  // [world_size]: where the requests of each asker end
  int64_t n;
  int64_t num_parts;
  int64_t world_size;
  int64_t* unique;  // room for n: the distinct ids, ascending
  int64_t* place;  // [n]: of each request among them
  int64_t* arrival_counts;  // [part][asker]: sums that come with the part
  int64_t* starts;  // room for n + 1: where the arrivals of each distinct id start in `arrivals`
  int64_t* arrivals;  // [n]: numbers of the arrivals of one id after the other; they are counted in (part, asker) order
};

// Fills in what the owner needs, the counts being zero; returns the number of distinct ids.
int64_t nestpipe_plan_own(const nestpipe_requests* requests) {
  const int64_t n = requests->n, ranks = requests->world_size, parts = requests->num_parts;
  try {
    const int64_t num_unique = nestpipe_ids_dedupe(requests->ids, n, requests->unique, requests->place);
    if (num_unique < 0) return kFailed;
    std::vector<int64_t> asker(n), place_of_arrival(n);
    for (int64_t rank = 0, i = 0; rank < ranks; ++rank) {
      for (; i < requests->asker_ends[rank]; ++i) asker[i] = rank;
    }
    const auto key = [&](int64_t i) { return requests->last_part[i] * ranks + asker[i]; };
    sort_by(n, ranks * parts, requests->arrival_counts, key,
            [&](int64_t i, int64_t number) { place_of_arrival[number] = requests->place[i]; });
    std::vector<int64_t> counts(num_unique);
    sort_by(n, num_unique, counts.data(), [&](int64_t number) { return place_of_arrival[number]; },
            [&](int64_t number, int64_t slot) { requests->arrivals[slot] = number; });
    requests->starts[0] = 0;
    std::inclusive_scan(counts.begin(), counts.end(), requests->starts + 1);
    return num_unique;
  } catch (const std::exception&) {
    return kFailed;
  }
}

}  // extern "C"
