// Shared by all attention sources: arguments, memory, sequences, tasks.
//
// A task is one sequence (or several short ones) and a group of heads that share the biases of a tile. Tasks depend on
// lengths and widths alone, so results do not depend on the number of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "simd.h"

// The arguments of all functions; ops/attention_native.py has the same list.
struct Attention {
  const float *q, *k, *v;
  int64_t q_row, k_row, v_row;  // floats from one row to the next; heads are contiguous
  const int64_t *query_offsets, *key_offsets, *num_targets;
  const float* position;
  int64_t num_position;
  const float* time;
  int64_t num_time;
  const float* decay;
  const int64_t* starts;  // where the pairs of each query begin
  const uint8_t* buckets;
  const float* log_gaps;
  int64_t num_sequences, num_heads, qk_width, v_width, num_channels;
  int64_t kind, mode, num_threads;
  double scale, norm;
  float *out, *kept;
  const float* grad;
  float *d_q, *d_k, *d_v, *d_position, *d_time, *d_decay;
};

namespace nestpipe {

constexpr int64_t kQueries = 48;  // rows and columns of a tile
constexpr int64_t kKeys = 64;
constexpr int64_t kSilu = 0;
constexpr int64_t kAdd = 0;

// A vector-aligned buffer of floats.
class Room {
 public:
  // Grows to at least this many floats; contents are undefined.
  void reserve(int64_t size) {
    if (size > capacity_) {
      capacity_ = round_up(size, kWidth) + kWidth;
      data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(capacity_ * 4, 64))));
      if (!data_) throw std::bad_alloc();
    }
  }
  void zeros(int64_t size) {
    reserve(size);
    std::fill_n(data_.get(), size, 0.0f);
  }
  float* at(int64_t place) { return data_.get() + place; }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

struct Task {
  int64_t first, last;  // in the order of sequences
  int64_t first_head, last_head;
  double cost;
};

// One sequence: where its rows are, and what they see.
struct Sequence {
  int64_t first_query, num_queries, first_key, num_keys, num_history;

  Sequence(const Attention& a, int64_t number)
      : first_query(a.query_offsets[number]),
        num_queries(a.query_offsets[number + 1] - first_query),
        first_key(a.key_offsets[number]),
        num_keys(a.key_offsets[number + 1] - first_key),
        num_history(num_keys - a.num_targets[number]) {}

  int64_t place(int64_t query) const { return num_keys - num_queries + query; }
  int64_t seen(int64_t query) const { return std::min(place(query) + 1, num_history); }
  bool is_target(int64_t query) const { return place(query) >= num_history; }
  int64_t stands(int64_t query) const { return std::min(place(query), num_history); }
  int64_t first_that_sees(int64_t key) const { return std::max<int64_t>(0, key - (num_keys - num_queries)); }
};

// Tables that all tasks read: the position bias reversed, so that a row of keys reads it forward.
struct Tables {
  int64_t longest = 0;
  Room position;

  explicit Tables(const Attention& a) {
    for (int64_t s = 0; s < a.num_sequences; ++s)
      longest = std::max(longest, a.key_offsets[s + 1] - a.key_offsets[s]);
    if (a.position == nullptr) return;
    position.zeros(size());
    for (int64_t distance = 0; distance <= longest; ++distance)
      *position.at(longest - distance) = a.position[std::min(distance, a.num_position - 1)];
  }
  // Vectors read past distance 0 for hidden keys.
  int64_t size() const { return longest + 1 + kKeys + kWidth; }
};

// Longest sequences first; those too short for a task of their own share one.
std::vector<Task> make_tasks(const Attention& a, std::vector<int64_t>& order);

// Runs all tasks on some threads; their order does not affect results. False if memory ran out.
template <typename Worker, typename Run>
bool run_tasks(const Attention& a, Tables& tables, const std::vector<Task>& tasks, Run run) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    try {
      Worker worker(a, tables);
      for (size_t i = next++; i < tasks.size() && !failed; i = next++) run(worker, i);
    } catch (const std::exception&) {
      failed = true;
    }
  };
  std::vector<std::thread> threads;
  try {
    const int64_t wanted = std::min<int64_t>(a.num_threads, static_cast<int64_t>(tasks.size()));
    for (int64_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads do the same work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return !failed;
}

}  // namespace nestpipe
