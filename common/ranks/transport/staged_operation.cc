#include "common/ranks/transport/staged_operation.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/cleanup/cleanup.h"

namespace tandem::ranks {
namespace {

c10::impl::VirtualGuardImpl Streams(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// Lets `later` wait for what `earlier` has to do.
void Order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

}  // namespace

// The streams of high priority are those of process groups.
StagedOperation::StagedOperation(c10::Device device)
    : stream_(Streams(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {
  Order(Streams(device).getStream(device), stream_);
}

StagedOperation::~StagedOperation() {
  try {
    if (!ended_) LetCurrentStreamWait();
  } catch (...) {  // the device has failed, as the next use of it says
  }
}

at::Tensor StagedOperation::Read(const at::Tensor& tensor) {
  const c10::StreamGuard guard(stream_);
  read_.push_back(tensor);
  return tensor.cpu();
}

at::Tensor StagedOperation::Write(const at::Tensor& tensor) {
  return written_.emplace_back(tensor, at::empty_like(tensor, at::kCPU)).second;
}

at::Tensor StagedOperation::Update(const at::Tensor& tensor) {
  return written_.emplace_back(tensor, Read(tensor)).second;
}

void StagedOperation::End() {
  const absl::Cleanup order = [this] { LetCurrentStreamWait(); };
  const c10::StreamGuard guard(stream_);
  for (const auto& [tensor, host] : written_) tensor.copy_(host);
}

void StagedOperation::LetCurrentStreamWait() {
  ended_ = true;
  Order(stream_, Streams(stream_.device()).getStream(stream_.device()));
}

}  // namespace tandem::ranks
