// Fixed 64-bit hashes, as in rng.py.

#pragma once

#include <cstdint>

namespace nestpipe {

// The finaliser of splitmix64.
inline uint64_t mix64(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// The bucket of an id: the upper half of its hash, which multiplying and shifting spreads evenly over any number of them.
inline int64_t bucket_of(int64_t id, int64_t num_buckets) {
  const uint64_t upper = mix64(static_cast<uint64_t>(id)) >> 32;
  return static_cast<int64_t>((upper * static_cast<uint64_t>(num_buckets)) >> 32);
}

}  // namespace nestpipe
