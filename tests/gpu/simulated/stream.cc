#include "tests/gpu/simulated/stream.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/memory.h"

namespace tandem::simulated_gpu {
namespace {

struct Copy {
  int64_t mark;
  at::Tensor to;    // undefined: the device reads `host`
  at::Tensor host;  // pinned, as the device reads it
  at::Tensor values;
};

struct Stream {
  std::mutex mutex;
  int64_t mark = 0, done = 0;
  std::deque<Copy> copies;
};

Stream& StreamOf(c10::DeviceIndex device) {
  static Stream* const streams = new Stream[kDevices];
  return streams[device];
}

void Add(c10::DeviceIndex device, Copy copy) {
  Stream& stream = StreamOf(device);
  const std::lock_guard lock(stream.mutex);
  copy.mark = ++stream.mark;
  stream.copies.push_back(std::move(copy));
}

void Finish(const Copy& copy) {
  if (copy.to.defined()) {
    copy.to.copy_(copy.values);
  } else if (!at::equal(copy.host.view(at::kByte), copy.values.view(at::kByte))) {
    std::fputs("simulated GPU: the host wrote to pinned memory that a copy still reads\n", stderr);
    std::abort();
  }
}

}  // namespace

Counts& TheCounts() {
  static Counts& counts = *new Counts;
  return counts;
}

void DeliverLater(c10::DeviceIndex device, const at::Tensor& to, const at::Tensor& values) {
  if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), kUnwritten, to.nbytes());
  Add(device, {.mark = 0, .to = to, .host = {}, .values = values});
}

void ReadLater(c10::DeviceIndex device, const at::Tensor& from) {
  const at::Tensor host = from.contiguous();
  if (!host.is_alias_of(from)) return;  // libtorch made a copy that nobody else writes to
  Add(device, {.mark = 0, .to = {}, .host = host.flatten(), .values = host.flatten().clone()});
}

int64_t Mark(c10::DeviceIndex device) {
  Stream& stream = StreamOf(device);
  const std::lock_guard lock(stream.mutex);
  return stream.mark;
}

bool IsDone(c10::DeviceIndex device, int64_t mark) {
  Stream& stream = StreamOf(device);
  const std::lock_guard lock(stream.mutex);
  return stream.done >= mark;
}

void Synchronize(c10::DeviceIndex device, int64_t mark) {
  ++TheCounts().synchronizations;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Stream& stream = StreamOf(device);
  const std::lock_guard lock(stream.mutex);
  while (!stream.copies.empty() && stream.copies.front().mark <= mark) {
    Finish(stream.copies.front());
    stream.done = stream.copies.front().mark;
    stream.copies.pop_front();
  }
  if (stream.copies.empty()) stream.done = stream.mark;
}

}  // namespace tandem::simulated_gpu
