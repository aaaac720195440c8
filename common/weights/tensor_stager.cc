#include "common/weights/tensor_stager.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "common/base/errors/catch_exceptions.h"
#include "common/base/errors/status_macros.h"
#include "common/weights/packing_thread.h"

namespace tandem {
namespace {

// Returns the most bytes of buffers: the next tensor comes while the largest is taken.
int64_t Capacity(const std::vector<WeightSpec>& tensors) {
  int64_t largest = 0;
  for (const WeightSpec& spec : tensors) largest = std::max(largest, spec.bytes());
  return 2 * largest;
}

}  // namespace

TensorStager::TensorStager(std::vector<WeightSpec> tensors, Take take, TakeShared take_shared)
    : tensors_(std::move(tensors)),
      take_(std::move(take)),
      take_shared_(std::move(take_shared)),
      capacity_(Capacity(tensors_)),
      thread_([this] { Run(); }) {}

TensorStager::~TensorStager() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void TensorStager::Write(absl::Span<const std::byte> data) {
  Divide(static_cast<int64_t>(data.size()), [&](int64_t from, int64_t count, std::byte* to) {
    std::memcpy(to, data.data() + from, static_cast<size_t>(count));
  });
}

void TensorStager::WriteFrom(const SharedRange& range) {
  Divide(range.size, [&](int64_t from, int64_t count, std::byte* to) {
    const int64_t offset = range.offset + from;
    if (!shared_.empty() && shared_.back().from == range.from &&
        shared_.back().offset + shared_.back().size == offset &&
        places_.back() + shared_.back().size == to) {
      shared_.back().size += count;  // of the chunk before, behind which these bytes are
      return;
    }
    shared_.push_back({.from = range.from, .offset = offset, .size = count});
    places_.push_back(to);
  });
}

void TensorStager::Divide(int64_t size,
                          absl::FunctionRef<void(int64_t from, int64_t count, std::byte* to)> put) {
  for (int64_t from = 0; from < size;) {
    if (written_ == 0) StartTensor();
    const int64_t bytes = tensors_[next_].bytes();
    const int64_t count = std::min(bytes - written_, size - from);
    if (buffer_ != nullptr) put(from, count, buffer_.get() + written_);
    written_ += count;
    from += count;
    if (written_ == bytes) EndTensor();
  }
}

void TensorStager::StartTensor() {
  const int64_t bytes = tensors_[next_].bytes();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !status_.ok() || held_ + bytes <= capacity_; });
  if (!status_.ok()) return;
  buffer_.reset(new (std::nothrow) std::byte[bytes]);
  if (buffer_ == nullptr) {
    status_ = absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", bytes, " bytes of \"", tensors_[next_].name, "\""));
    return;
  }
  held_ += bytes;
}

void TensorStager::EndTensor() {
  const std::lock_guard lock(mutex_);
  if (buffer_ != nullptr) {
    waiting_.push_back({.spec = &tensors_[next_],
                        .bytes = std::move(buffer_),
                        .shared = std::exchange(shared_, {}),
                        .places = std::exchange(places_, {})});
  }
  ++next_;
  written_ = 0;
  changed_.notify_all();
}

absl::Status TensorStager::Finish(const CallScope& call) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return !status_.ok() || taken_ == tensors_.size(); };
  while (!ended()) {
    absl::Status gone = call.Check();
    if (!gone.ok()) return gone;
    changed_.wait_until(lock, call.cancellation, call.deadline.ToChrono(), ended);
  }
  return status_;
}

absl::Status TensorStager::TakeTensor(Tensor& tensor) {
  int64_t on_gpus = 0;
  for (const SharedRange& range : tensor.shared) on_gpus += range.from->on_gpu() ? range.size : 0;
  // After a stream that broke, a tensor may have come in both ways.
  if (take_shared_ != nullptr && on_gpus > 0 && on_gpus == tensor.spec->bytes()) {
    tensor.bytes.reset();
    return CatchExceptions("weights", [&] { return take_shared_(*tensor.spec, tensor.shared); });
  }
  for (size_t i = 0; i < tensor.shared.size(); ++i) {
    const SharedRange& range = tensor.shared[i];
    TANDEM_RETURN_IF_ERROR(
        range.from->Read(range.offset, {tensor.places[i], static_cast<size_t>(range.size)}));
  }
  return CatchExceptions("weights", [&] { return take_(*tensor.spec, std::move(tensor.bytes)); });
}

void TensorStager::Run() {
  BecomePackingThread();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    Tensor tensor = std::move(waiting_.front());
    waiting_.pop_front();
    absl::Status status = status_;
    lock.unlock();
    if (status.ok()) status = TakeTensor(tensor);
    tensor.bytes.reset();
    lock.lock();
    held_ -= tensor.spec->bytes();
    ++taken_;
    status_.Update(status);  // Write may have failed meanwhile
    changed_.notify_all();
  }
}

}  // namespace tandem
