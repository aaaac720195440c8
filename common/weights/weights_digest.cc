#include "common/weights/weights_digest.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>

#include "absl/functional/function_ref.h"
#include "common/base/errors/status_macros.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem {
namespace {

// Words that a thread sums up at a time.
constexpr int64_t kGrain = int64_t{1} << 18;
constexpr int64_t kWordBytes = 4;

// Returns the sum of what `sum` returns for ranges of 0 .. count - 1, which ATen's threads share.
WordSums SumInParallel(int64_t count, int64_t grain,
                       absl::FunctionRef<WordSums(int64_t from, int64_t to)> sum) {
  std::mutex mutex;
  WordSums total;
  at::parallel_for(0, count, grain, [&](int64_t from, int64_t to) {
    const WordSums part = sum(from, to);
    const std::lock_guard lock(mutex);
    total += part;
  });
  return total;
}

}  // namespace

void WeightsHasher::AddRows(absl::string_view name, int64_t begin, int64_t stride,
                            const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  if (values.numel() == 0) {
    sums_.Add(name, {});
    return;
  }
  if (!values.is_cpu()) {
    const int64_t step = std::max<int64_t>(1, kDeviceValuesAtATime / values.size(1));
    for (int64_t row = 0; row < values.size(0); row += step) {
      const at::Tensor some = values.detach().narrow(0, row, std::min(step, values.size(0) - row));
      pending_.emplace_back(std::string(name), SumWordsOnDevice(begin + row * stride, stride,
                                                                some.to(at::kFloat).contiguous()));
    }
    return;
  }
  // No copy where the values are float32 already.
  const at::Tensor rows = values.detach().to(at::kFloat).contiguous();
  const auto* const words = static_cast<const char*>(rows.const_data_ptr());
  const int64_t width = rows.size(1);
  if (rows.size(0) == 1) {
    sums_.Add(name, SumWordsInParallel(begin, words, width));
    return;
  }
  sums_.Add(name, SumInParallel(rows.size(0), std::max<int64_t>(1, kGrain / width),
                                [&](int64_t from, int64_t to) {
                                  WordSums sums;
                                  for (int64_t row = from; row < to; ++row) {
                                    sums += SumWords(begin + row * stride,
                                                     words + row * width * kWordBytes, width);
                                  }
                                  return sums;
                                }));
}

WordSums SumWordsInParallel(int64_t begin, const void* words, int64_t count) {
  return SumInParallel(count, kGrain, [&](int64_t from, int64_t to) {
    return SumWords(begin + from, static_cast<const char*>(words) + from * kWordBytes, to - from);
  });
}

const TensorSums& WeightsHasher::Sums() {
  if (pending_.empty()) return sums_;
  std::vector<at::Tensor> all;
  for (const auto& [name, sums] : pending_) all.push_back(sums);
  const at::Tensor host = at::stack(all).cpu();
  const auto* sums = host.const_data_ptr<int64_t>();
  for (const auto& [name, tensor] : pending_) {
    sums_.Add(name,
              {.first = static_cast<uint64_t>(sums[0]), .second = static_cast<uint64_t>(sums[1])});
    sums += 2;
  }
  pending_.clear();
  return sums_;
}

at::Tensor SumWordsOnDevice(int64_t begin, int64_t stride, const at::Tensor& values) {
  const at::Device device = values.device();
  std::vector<at::Tensor> word_keys;
  for (const BlockKeys& keys : WordKeys()) {
    word_keys.push_back(CopyToDevice(std::vector<int64_t>(keys.begin(), keys.end()), device));
  }
  at::Tensor total = at::zeros({2}, at::device(device).dtype(at::kLong));
  const auto add = [&](int64_t first, const at::Tensor& part) {
    const int64_t rows = part.size(0), width = part.size(1);
    const int64_t block = first / kWordsOfBlock;
    const int64_t last = first + (rows - 1) * stride + width - 1;
    const auto options = total.options();
    const at::Tensor place = at::arange(rows, options).mul_(stride).add_(first).unsqueeze(1) +
                             at::arange(width, options).unsqueeze(0);
    const at::Tensor words = part.view(at::kInt).to(at::kLong).bitwise_and_(int64_t{0xffffffff});
    const at::Tensor in_block = place.remainder(kWordsOfBlock);
    const at::Tensor blocks = place.sub_(in_block).div_(kWordsOfBlock, "floor").sub_(block);
    for (int64_t sum = 0; sum < 2; ++sum) {
      std::vector<int64_t> keys;
      for (int64_t i = block; i <= last / kWordsOfBlock; ++i) {
        keys.push_back(static_cast<int64_t>(KeyOfBlock(sum, i)));
      }
      const at::Tensor key = word_keys[static_cast<size_t>(sum)].take(in_block);
      total.select(0, sum).add_(
          key.mul_(CopyToDevice(keys, device).take(blocks)).mul_(words).sum());
    }
  };
  const int64_t rows = values.size(0), width = values.size(1);
  if (rows == 1 || width >= kDeviceWords) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < width; i += kDeviceWords) {
        const int64_t count = std::min(kDeviceWords, width - i);
        add(begin + row * stride + i, values.narrow(0, row, 1).narrow(1, i, count));
      }
    }
    return total;
  }
  const int64_t step = std::max<int64_t>(1, kDeviceWords / std::max(width, stride));
  for (int64_t row = 0; row < rows; row += step) {
    add(begin + row * stride, values.narrow(0, row, std::min(step, rows - row)));
  }
  return total;
}

at::Tensor SumBytesOnDevice(int64_t begin, const at::Tensor& values) {
  const at::Tensor bytes = values.view({-1}).view(at::kByte);
  const int64_t words = bytes.numel() / kWordBytes, rest = bytes.numel() % kWordBytes;
  const auto sum = [](int64_t from, const at::Tensor& whole) {
    return SumWordsOnDevice(from, 0, whole.view(at::kInt).unsqueeze(0));
  };
  at::Tensor sums = sum(begin, bytes.narrow(0, 0, words * kWordBytes));
  if (rest > 0) {
    const at::Tensor last = at::zeros({kWordBytes}, bytes.options());
    last.narrow(0, 0, rest).copy_(bytes.narrow(0, words * kWordBytes, rest));
    sums.add_(sum(begin + words, last));
  }
  return sums;
}

absl::StatusOr<std::string> WeightsDigest(TensorSource source) {
  WeightsHasher hasher;
  TANDEM_RETURN_IF_ERROR(source([&](const std::string& name, const at::Tensor& tensor) {
    hasher.Add(name, tensor);
    return absl::OkStatus();
  }));
  return hasher.Hex();
}

std::string WeightsDigest(const NamedTensors& tensors) { return *WeightsDigest(SourceOf(tensors)); }

}  // namespace tandem
