// The rows that a lane's vision tower gives the tokens of images, as far as passes read them.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_IMAGES_IMAGE_ROWS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_IMAGES_IMAGE_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "common/model/model.h"

namespace tandem::rollout {

// Computes an image once for all sequences of a pass, and keeps the rows of the images that were
// read last, for prompts that are consumed in several passes. What is gone is computed again, with
// the same bits.
class ImageRows {
 public:
  // `model` outlives this; `capacity_bytes` is the bound of the rows that stay after a pass.
  ImageRows(const Model* model, int64_t capacity_bytes)
      : model_(model), capacity_bytes_(capacity_bytes) {}

  // Returns the rows of each image of the sequence's prompt, undefined for those of which the pass
  // consumes no token. May throw c10::Error.
  std::vector<at::Tensor> Of(const DecodeInput& sequence);
  // Drops what exceeds the capacity: the images that were read least recently.
  void Trim();
  // Drops all rows: they come from weights that are gone.
  void Forget();

 private:
  struct Entry {
    std::string digest;
    VisionGrid grid;
    at::Tensor rows;
  };

  const at::Tensor& Rows(const VisionInput& input);

  const Model* const model_;
  const int64_t capacity_bytes_;
  int64_t bytes_ = 0;
  std::list<Entry> entries_;  // the image that was read least recently is at the front
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_IMAGES_IMAGE_ROWS_H_
