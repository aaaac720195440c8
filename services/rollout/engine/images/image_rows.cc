#include "services/rollout/engine/images/image_rows.h"

#include <algorithm>

namespace tandem::rollout {

const at::Tensor& ImageRows::Rows(const VisionInput& input) {
  const auto found = std::ranges::find_if(entries_, [&](const Entry& entry) {
    return entry.digest == input.digest && entry.grid == input.shape.grid;
  });
  if (found != entries_.end()) {
    entries_.splice(entries_.end(), entries_, found);
    return found->rows;
  }
  entries_.push_back(
      {.digest = input.digest, .grid = input.shape.grid, .rows = model_->ImageRows(input)});
  bytes_ += static_cast<int64_t>(entries_.back().rows.nbytes());
  return entries_.back().rows;
}

std::vector<at::Tensor> ImageRows::Of(const DecodeInput& sequence) {
  const PromptImages& images = *sequence.images;
  std::vector<at::Tensor> rows(images.inputs.size());
  const int64_t end = sequence.start + static_cast<int64_t>(sequence.tokens.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (images.found.first_tokens[i] < end && images.found.end_tokens[i] > sequence.start) {
      rows[i] = Rows(images.inputs[i]);
    }
  }
  return rows;
}

void ImageRows::Trim() {
  while (bytes_ > capacity_bytes_) {
    bytes_ -= static_cast<int64_t>(entries_.front().rows.nbytes());
    entries_.pop_front();
  }
}

void ImageRows::Forget() {
  entries_.clear();
  bytes_ = 0;
}

}  // namespace tandem::rollout
