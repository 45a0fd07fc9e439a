// Assigns units (samples, or groups of samples that stay together) to micro-batches: see pipeline/sample_clustering.py.
//
// Greedy: a micro-batch repeatedly takes the unit that adds the least weight of new keys, ties by number. The added weight
// of each unit is maintained: when a micro-batch gets a key, all units with that key become cheaper. A key of a single unit
// makes no other unit cheaper, so it is counted in that unit's cost once and dropped.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <numeric>
#include <vector>

extern "C" {

// Samples have the keys numbers[offsets[s]] ..., numbers of ids in `ids`, which ascend as those in `previous` do. Unit u is
// the samples samples[unit_offsets[u]] ...
struct nestpipe_samples {
  const int64_t* offsets;
  const int64_t* numbers;
  const int64_t* ids;
  int64_t num_ids;
  const int64_t* previous;
  int64_t num_previous;
  const int64_t* samples;
  const int64_t* unit_offsets;
  int64_t num_units;
};

}  // extern "C"

namespace {

constexpr int64_t kFailed = -1;

// Lists of numbers, back to back: list i is values[offsets[i]] ... values[offsets[i + 1] - 1].
struct Lists {
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> values;

  const int32_t* begin(int64_t i) const { return values.data() + offsets[i]; }
  const int32_t* end(int64_t i) const { return values.data() + offsets[i + 1]; }
  int64_t size(int64_t i) const { return offsets[i + 1] - offsets[i]; }
};

// How much each id counts: double if it is in the previous batch.
std::vector<uint8_t> weights_of(const nestpipe_samples& input) {
  std::vector<uint8_t> weights(input.num_ids, 1);
  int64_t other = 0;
  for (int64_t number = 0; number < input.num_ids; ++number) {
    while (other < input.num_previous && input.previous[other] < input.ids[number]) ++other;
    if (other < input.num_previous && input.previous[other] == input.ids[number]) weights[number] = 2;
  }
  return weights;
}

class Greedy {
 public:
  Greedy(const nestpipe_samples& input, int64_t budget)
      : weights_(weights_of(input)),
        unit_offsets_(input.unit_offsets),
        budget_(budget),
        left_(input.num_units),
        full_costs_(input.num_units, 0),
        seen_in_(input.num_ids, -1) {
    std::iota(left_.begin(), left_.end(), 0);
    const Lists all = distinct_keys(input);
    units_of_.offsets.assign(input.num_ids + 1, 0);
    for (int32_t key : all.values) ++units_of_.offsets[key + 1];
    std::vector<bool> shared(input.num_ids);
    for (int64_t key = 0; key < input.num_ids; ++key) shared[key] = units_of_.offsets[key + 1] > 1;
    std::partial_sum(units_of_.offsets.begin(), units_of_.offsets.end(), units_of_.offsets.begin());
    units_of_.values.resize(all.values.size());
    std::vector<int64_t> next(units_of_.offsets);
    for (int32_t unit : left_) {
      for (const int32_t* key = all.begin(unit); key != all.end(unit); ++key) {
        full_costs_[unit] += weights_[*key];
        units_of_.values[next[*key]++] = unit;
        if (shared[*key]) keys_of_.values.push_back(*key);
      }
      keys_of_.offsets.push_back(static_cast<int64_t>(keys_of_.values.size()));
    }
  }

  // Fills the micro-batch with about `target` samples; returns how many it got.
  int64_t fill(int64_t micro_batch, int64_t target, int64_t* micro_batch_of) {
    costs_ = full_costs_;
    int64_t size = 0;
    while (!left_.empty()) {
      const int64_t place = cheapest();
      const int32_t unit = left_[place];
      const int64_t more = unit_offsets_[unit + 1] - unit_offsets_[unit];
      if (size + more - target >= target - size) break;
      left_.erase(left_.begin() + place);
      micro_batch_of[unit] = micro_batch;
      size += more;
      take_keys(micro_batch, unit);
    }
    return size;
  }

  void give_rest(int64_t micro_batch, int64_t* micro_batch_of) {
    for (int32_t unit : left_) micro_batch_of[unit] = micro_batch;
    left_.clear();
  }

 private:
  static Lists distinct_keys(const nestpipe_samples& input) {
    Lists all;
    std::vector<int64_t> last_unit(input.num_ids, -1);
    for (int64_t unit = 0; unit < input.num_units; ++unit) {
      for (int64_t place = input.unit_offsets[unit]; place < input.unit_offsets[unit + 1]; ++place) {
        const int64_t sample = input.samples[place];
        for (int64_t k = input.offsets[sample]; k < input.offsets[sample + 1]; ++k) {
          const int64_t key = input.numbers[k];
          if (last_unit[key] != unit) all.values.push_back(static_cast<int32_t>(key));
          last_unit[key] = unit;
        }
      }
      all.offsets.push_back(static_cast<int64_t>(all.values.size()));
    }
    return all;
  }

  int64_t cheapest() {
    if (spent_ >= budget_) return 0;
    spent_ += static_cast<int64_t>(left_.size());
    const auto cheaper = [this](int32_t one, int32_t other) { return costs_[one] < costs_[other]; };
    return std::min_element(left_.begin(), left_.end(), cheaper) - left_.begin();  // the first of equal ones
  }

  void take_keys(int64_t micro_batch, int32_t unit) {
    if (spent_ >= budget_) return;
    for (const int32_t* key = keys_of_.begin(unit); key != keys_of_.end(unit); ++key) {
      if (seen_in_[*key] == micro_batch) continue;
      seen_in_[*key] = micro_batch;
      spent_ += units_of_.size(*key);
      for (const int32_t* other = units_of_.begin(*key); other != units_of_.end(*key); ++other) {
        costs_[*other] -= weights_[*key];
      }
    }
  }

  std::vector<uint8_t> weights_;
  const int64_t* unit_offsets_;
  int64_t budget_;
  int64_t spent_ = 0;
  std::vector<int32_t> left_;  // units without a micro-batch, ascending
  std::vector<int32_t> full_costs_;  // of a unit, for a micro-batch without keys
  std::vector<int32_t> costs_;  // for the micro-batch that is being filled
  std::vector<int64_t> seen_in_;  // the last micro-batch that got the key
  Lists keys_of_;  // unit -> its distinct keys that others have too
  Lists units_of_;  // key -> the units that have it
};

}  // namespace

extern "C" {

// Writes the micro-batch of each unit and returns 0, or kFailed if memory ran out.
int64_t nestpipe_cluster(const nestpipe_samples* input, const int64_t* sizes, int64_t num_micro_batches, int64_t budget,
                         int64_t* micro_batch_of) {
  try {
    Greedy greedy(*input, budget);
    std::vector<int64_t> order{0};
    if (num_micro_batches > 1) order.push_back(num_micro_batches - 1);
    for (int64_t micro_batch = 1; micro_batch < num_micro_batches - 1; ++micro_batch) order.push_back(micro_batch);
    int64_t missing = 0;  // in the middle so far
    for (uint64_t k = 0; k + 1 < order.size(); ++k) {
      const int64_t micro_batch = order[k];
      const bool is_middle = micro_batch > 0 && micro_batch < num_micro_batches - 1;
      const int64_t target = sizes[micro_batch] + (is_middle ? missing : 0);
      const int64_t size = target > 0 ? greedy.fill(micro_batch, target, micro_batch_of) : 0;
      if (is_middle) missing = target - size;
    }
    greedy.give_rest(order.back(), micro_batch_of);
    return 0;
  } catch (const std::exception&) {
    return kFailed;
  }
}

}  // extern "C"
