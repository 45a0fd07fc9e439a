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

}  // namespace nestpipe
