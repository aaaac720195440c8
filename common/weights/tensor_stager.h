// Cuts the byte stream of a weight update into tensors, and has them taken, one after the other, on
// a thread of its own while the stream goes on.
//
//   TensorStager stager(manifest.tensors, [&](const WeightSpec& spec, TensorBytes bytes) {
//     return prepared.Add(spec, std::move(bytes));
//   });
//   for (…) stager.Write(chunk);
//   TANDEM_RETURN_IF_ERROR(stager.Finish(call));
#ifndef TANDEM_COMMON_WEIGHTS_TENSOR_STAGER_H_
#define TANDEM_COMMON_WEIGHTS_TENSOR_STAGER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/base/call_scope.h"
#include "common/base/files/shared_bytes.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

using TensorBytes = std::unique_ptr<std::byte[]>;

// Bytes that are still in the sender's file or memory.
struct SharedRange {
  std::shared_ptr<const SharedBytes> from;
  int64_t offset, size;
};

// Write and WriteFrom are called by one thread at a time.
class TensorStager {
 public:
  // Takes the next tensor, of WeightSpec::bytes() bytes. Its thread has a low priority.
  using Take = std::function<absl::Status(const WeightSpec& spec, TensorBytes bytes)>;

  // The same for a tensor of which all bytes are still in memory of GPUs, one range behind the
  // other.
  using TakeShared =
      std::function<absl::Status(const WeightSpec& spec, absl::Span<const SharedRange> ranges)>;

  // Without `take_shared`, bytes in memory of GPUs are read as those of files.
  TensorStager(std::vector<WeightSpec> tensors, Take take, TakeShared take_shared = nullptr);
  // Waits for the tensor that is being taken; the others are dropped.
  ~TensorStager();
  TensorStager(const TensorStager&) = delete;
  TensorStager& operator=(const TensorStager&) = delete;

  // Copies the next bytes, which do not go beyond the last tensor. Waits while that would make the
  // stager hold more than twice the bytes of the largest tensor. After an error it drops the bytes.
  void Write(absl::Span<const std::byte> data);
  // The same for bytes that are still the sender's, which are read, on the stager's thread, when
  // their tensor is taken. An error of reading is one of `take`.
  void WriteFrom(const SharedRange& range);

  // Waits until all tensors have been taken; the whole stream must have been written. Returns the
  // first error of `take`; RESOURCE_EXHAUSTED if there was no memory; CANCELLED or
  // DEADLINE_EXCEEDED if `call` ends first, and then it may be called again.
  absl::Status Finish(const CallScope& call);

 private:
  struct Tensor {
    const WeightSpec* spec;
    TensorBytes bytes;  // untouched where they are in `shared`
    std::vector<SharedRange> shared;
    std::vector<std::byte*> places;  // of each range in `bytes`
  };

  void Run();
  absl::Status TakeTensor(Tensor& tensor);
  // Divides the stream's next `size` bytes among the tensors: put(from, count, to) for `count` of
  // them, from byte `from` on, and their place; not called after an error.
  void Divide(int64_t size,
              absl::FunctionRef<void(int64_t from, int64_t count, std::byte* to)> put);
  // Makes the buffer of the tensor whose bytes come next.
  void StartTensor();
  // Queues the tensor in the buffer.
  void EndTensor();

  const std::vector<WeightSpec> tensors_;
  const Take take_;
  const TakeShared take_shared_;
  int64_t capacity_ = 0;  // most bytes of buffers

  // Used by Write and WriteFrom alone.
  size_t next_ = 0;      // of tensors_, whose bytes come next
  int64_t written_ = 0;  // bytes of it
  TensorBytes buffer_;   // nullptr after an error
  std::vector<SharedRange> shared_;
  std::vector<std::byte*> places_;

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Tensor> waiting_;
  int64_t held_ = 0;  // bytes of all buffers
  size_t taken_ = 0;  // number of tensors
  bool stopping_ = false;
  absl::Status status_;  // the first error

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_TENSOR_STAGER_H_
