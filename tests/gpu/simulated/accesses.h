// The last accesses of streams to each byte of an allocation.
#ifndef TANDEM_TESTS_GPU_SIMULATED_ACCESSES_H_
#define TANDEM_TESTS_GPU_SIMULATED_ACCESSES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {

class Accesses {
 public:
  explicit Accesses(size_t bytes) : bytes_(bytes), parts_{{0, {}}} {}

  size_t bytes() const { return bytes_; }
  // Adds an operation of `stream`, the last one of `before`, on the bytes [begin, end). Returns the
  // stream of an operation on them that is not among those before, if one of the two writes.
  std::optional<int> Add(size_t begin, size_t end, bool writes, int stream, const Progress& before);
  // Returns a stream, of those that are not left out, that has an operation behind `before`.
  std::optional<int> UsedAfter(const Progress& before,
                               const std::array<bool, kStreams>& left_out) const;
  // Whether an operation behind `before` writes.
  bool WrittenAfter(const Progress& before) const;

 private:
  struct Access {
    int writer = 0;       // the stream that wrote last
    int64_t written = 0;  // the number of that operation
    Progress read = {};   // the last operation of each stream that has read since
  };

  // Lets a part begin at a byte.
  void Divide(size_t at);

  size_t bytes_;
  std::map<size_t, Access> parts_;  // by their first byte
};

}  // namespace tandem::simulated_gpu

#endif  // TANDEM_TESTS_GPU_SIMULATED_ACCESSES_H_
