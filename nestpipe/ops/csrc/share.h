// Runs a range on several threads, for kernels whose results do not depend on how it is divided.

#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace nestpipe {

// Runs work(begin, end) over [0, n) on up to `num_threads` threads, this one included, of at least `min_share` each.
template <typename Work>
void share(int64_t n, int64_t num_threads, int64_t min_share, const Work& work) {
  num_threads = std::max<int64_t>(1, std::min(num_threads, n / min_share));
  std::vector<std::thread> threads;
  int64_t begin = 0;
  try {
    for (int64_t k = 1; k < num_threads; ++k) {
      const int64_t end = n / num_threads * k;
      threads.emplace_back(work, begin, end);
      begin = end;
    }
  } catch (const std::system_error&) {  // no more threads: this one does the rest
  } catch (const std::bad_alloc&) {
  }
  work(begin, n);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace nestpipe
