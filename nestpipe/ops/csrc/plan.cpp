// Routing of ids in a window: the requester's plan, and the owner's plan for the requests of all requesters.
//
// A window is micro-batches 0 .. P-1; ids are those of all micro-batches, back to back. Its distinct ids have *places*,
// sorted by (owner, first micro-batch, eighth of the owner's buckets, id). The local rows of one micro-batch, its *leaf*, are
// those of its distinct ids in the order of their places.
// Answers are functions of the arguments alone. No function throws: one that runs out of memory returns kFailed.

#include <cstdint>
#include <exception>
#include <numeric>
#include <vector>

#include "hash.h"

extern "C" {

int64_t nestpipe_ids_dedupe(const int64_t* ids, int64_t n, int64_t* unique, int64_t* inverse);  // ids.cpp

// The inputs and outputs of a plan. Counts are [owner][micro-batch].
struct nestpipe_plan {
  const int64_t* ids;  // [n]
  const int64_t* micro_batch_ends;  // [num_parts]: where the ids of each micro-batch end
  int64_t n;
  int64_t num_micro_batches;
  int64_t num_buckets;
  int64_t world_size;
  int64_t* unique;  // room for n: the distinct ids, place by place
  uint8_t* last_micro_batch;  // room for n: of each place
  uint8_t* eighths;  // room for n: of each place
  int64_t* index;  // [n]: where the id's row is in the leaf of its micro-batch
  int64_t* again;  // room for n: leaf positions of rows that an earlier micro-batch has, micro-batch after micro-batch
  int64_t* source;  // room for n: the micro-batch that had each of them last, << 32, and its position there
  int64_t* leaving;  // room for n: leaf positions of rows that no later micro-batch has, micro-batch after micro-batch
  int64_t* first_counts;  // places whose first micro-batch it is
  int64_t* last_counts;  // places whose last micro-batch it is
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
  return nestpipe::bucket_of(id, num_buckets) * world_size / num_buckets;
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
  const int64_t n = plan.n, micro_batches = plan.num_micro_batches, ranks = plan.world_size;
  std::vector<int64_t> ids(n), place_of(n);  // the distinct ids, ascending; first their numbers, then their places
  const int64_t num_unique = nestpipe_ids_dedupe(plan.ids, n, ids.data(), plan.index);
  if (num_unique < 0) return kFailed;
  std::vector<int64_t> first(num_unique, micro_batches), eighth(num_unique);
  std::vector<uint8_t> last(num_unique);
  for (int64_t micro_batch = 0, i = 0; micro_batch < micro_batches; ++micro_batch) {
    for (; i < plan.micro_batch_ends[micro_batch]; ++i) {
      const int64_t number = plan.index[i];
      if (first[number] == micro_batches) first[number] = micro_batch;
      last[number] = static_cast<uint8_t>(micro_batch);
    }
  }
  for (int64_t u = 0; u < num_unique; ++u) eighth[u] = owner_of(ids[u], plan.num_buckets, ranks * kEighths);
  std::vector<int64_t> first_of(num_unique), owner_of_place(num_unique), counts(ranks * micro_batches * kEighths);
  const auto key = [&](int64_t u) {
    return (eighth[u] / kEighths * micro_batches + first[u]) * kEighths + eighth[u] % kEighths;
  };
  sort_by(num_unique, ranks * micro_batches * kEighths, counts.data(), key, [&](int64_t u, int64_t place) {
    place_of[u] = place;
    plan.unique[place] = ids[u];
    plan.last_micro_batch[place] = last[u];
    first_of[place] = first[u];
    owner_of_place[place] = eighth[u] / kEighths;
    plan.eighths[place] = static_cast<uint8_t>(eighth[u] % kEighths);
  });
  for (size_t i = 0; i < counts.size(); ++i) plan.first_counts[i / kEighths] += counts[i];
  Ranked members(num_unique);
  std::vector<int64_t> seen(num_unique);  // where each place was last
  int64_t num_again = 0, num_leaving = 0;
  for (int64_t micro_batch = 0, begin = 0; micro_batch < micro_batches; begin = plan.micro_batch_ends[micro_batch++]) {
    members.clear();
    for (int64_t i = begin; i < plan.micro_batch_ends[micro_batch]; ++i) {
      plan.index[i] = place_of[plan.index[i]];
      members.insert(plan.index[i]);
    }
    members.rank_all([&](int64_t place, int64_t position) {
      if (first_of[place] < micro_batch) {
        plan.again[num_again] = position;
        plan.source[num_again++] = seen[place];
      }
      if (plan.last_micro_batch[place] == micro_batch) {
        plan.leaving[num_leaving++] = position;
        ++plan.last_counts[owner_of_place[place] * micro_batches + micro_batch];
      }
      seen[place] = micro_batch << 32 | position;
      ++plan.leaf_counts[owner_of_place[place] * micro_batches + micro_batch];
    });
    for (int64_t i = begin; i < plan.micro_batch_ends[micro_batch]; ++i) plan.index[i] = members.rank(plan.index[i]);
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

// The requests that an owner receives: ids with the last micro-batch of each, requester after requester.
struct nestpipe_requests {
  const int64_t* ids;  // [n]
  const uint8_t* last_micro_batch;  // [n]
  const int64_t* requester_ends;  // [world_size]: where the requests of each requester end
  int64_t n;
  int64_t num_micro_batches;
  int64_t world_size;
  int64_t* unique;  // room for n: the distinct ids, ascending
  int64_t* place;  // [n]: of each request among them
  int64_t* arrival_counts;  // [micro-batch][requester]: sums that come with the micro-batch
  int64_t* starts;  // room for n + 1: where the arrivals of each distinct id start in `arrivals`
  int64_t* arrivals;  // [n]: numbers of the arrivals of one id after the other; they are counted in (micro-batch, requester) order
};

// Fills in the owner's plan, whose counts are zero; returns the number of distinct ids.
int64_t nestpipe_plan_own(const nestpipe_requests* requests) {
  const int64_t n = requests->n, ranks = requests->world_size, micro_batches = requests->num_micro_batches;
  try {
    const int64_t num_unique = nestpipe_ids_dedupe(requests->ids, n, requests->unique, requests->place);
    if (num_unique < 0) return kFailed;
    std::vector<int64_t> requester(n), place_of_arrival(n);
    for (int64_t rank = 0, i = 0; rank < ranks; ++rank) {
      for (; i < requests->requester_ends[rank]; ++i) requester[i] = rank;
    }
    const auto key = [&](int64_t i) { return requests->last_micro_batch[i] * ranks + requester[i]; };
    sort_by(n, ranks * micro_batches, requests->arrival_counts, key,
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
