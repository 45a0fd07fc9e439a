// Attention over jagged sequences, as defined in ops/attention.py: tasks, and the plan of lengths and times.
// The kernels are in attention_tiles.h, attention_forward.cpp and attention_backward.cpp.

#include "attention.h"
#include "time_buckets.h"

#include <numeric>

namespace nestpipe {

constexpr int64_t kTasks = 64;        // short sequences share a task, so that there are about this many
constexpr int64_t kGroupWidth = 128;  // heads share a tile's biases up to this total width; wider groups miss the cache

std::vector<Task> make_tasks(const Attention& a, std::vector<int64_t>& order) {
  order.resize(a.num_sequences);
  std::iota(order.begin(), order.end(), 0);
  auto cost = [&](int64_t number) {
    const Sequence s(a, number);
    return static_cast<double>(s.num_queries) * static_cast<double>(s.num_keys + 16);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return cost(x) > cost(y); });
  double total = 0;
  for (int64_t number : order) total += cost(number);
  const int64_t width = std::max(a.qk_width, a.v_width);
  const int64_t group = std::max<int64_t>(1, std::min(a.num_heads, kGroupWidth / width));
  std::vector<Task> tasks;
  for (int64_t first = 0, last; first < a.num_sequences && cost(order[first]) > 0; first = last) {
    double sum = 0;
    for (last = first; last < a.num_sequences && cost(order[last]) > 0 && (last == first || sum < total / kTasks); ++last)
      sum += cost(order[last]);
    for (int64_t head = 0; head < a.num_heads; head += group)
      tasks.push_back({first, last, head, std::min(head + group, a.num_heads), sum});
  }
  return tasks;
}

}  // namespace nestpipe

namespace {

using namespace nestpipe;

// Whether a query and the one before it are targets that see the same keys at the same time, themselves included.
bool same_as_before(const Sequence& s, int64_t query, const int64_t* query_times,
                    const int64_t* key_times) {
  if (query == 0 || !s.is_target(query) || !s.is_target(query - 1) || s.seen(query) != s.seen(query - 1)) return false;
  const int64_t number = s.first_query + query;
  return query_times[number] == query_times[number - 1] &&
         key_times[s.first_key + s.place(query)] == key_times[s.first_key + s.place(query - 1)];
}

}  // namespace

extern "C" {

// Where the pairs of each query begin [queries + 1]: the keys it sees, padded to whole vectors.
void nestpipe_attention_starts(const Attention* a, int64_t* starts) {
  int64_t next = 0;
  for (int64_t number = 0; number < a->num_sequences; ++number) {
    const Sequence s(*a, number);
    for (int64_t query = 0; query < s.num_queries; ++query) {
      starts[s.first_query + query] = next;
      next += round_up(s.seen(query) + 1, 16);
    }
  }
  starts[a->query_offsets[a->num_sequences]] = next + 16;
}

// The time bucket and log gap of every pair; null outputs are skipped.
void nestpipe_attention_pairs(const Attention* a, const int64_t* query_times, const int64_t* key_times,
                              const int64_t* boundaries, int64_t num_boundaries, uint8_t* buckets, float* log_gaps) {
  Buckets search(boundaries, num_boundaries);
  for (int64_t number = 0; number < a->num_sequences; ++number) {
    const Sequence s(*a, number);
    const int64_t* keys = key_times + s.first_key;
    BucketRuns runs(boundaries, num_boundaries, keys, s.num_history);
    for (int64_t query = 0; query < s.num_queries; ++query) {
      const int64_t asked = query_times[s.first_query + query], start = a->starts[s.first_query + query];
      const int64_t seen = s.seen(query), count = seen + s.is_target(query);
      if (same_as_before(s, query, query_times, key_times)) {  // candidates of one request, the most common rows in serving
        const int64_t before = a->starts[s.first_query + query - 1];
        if (buckets != nullptr) std::copy_n(buckets + before, count, buckets + start);
        if (log_gaps != nullptr) std::copy_n(log_gaps + before, round_up(count, kWidth), log_gaps + start);
        continue;
      }
      const auto gap = [&](int64_t i) { return gap_of(asked, keys[i < seen ? i : s.place(query)]); };
      if (buckets != nullptr)
        for (int64_t i = runs.fill(asked, seen, buckets + start); i < count; ++i) buckets[start + i] = search.of(gap(i));
      if (log_gaps == nullptr) continue;
      for (int64_t i = 0; i < count; ++i) log_gaps[start + i] = static_cast<float>(gap(i));
      for (int64_t i = 0; i < count; i += kWidth) store(log_gaps + start + i, log(load(log_gaps + start + i)));
    }
  }
}
}
