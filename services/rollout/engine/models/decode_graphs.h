// Passes of decoding that a GPU repeats as captured graphs (common/tensor/aten/device_graph.h), so
// that the host begins one with a copy, a replay and a copy, whatever the model and the number of
// sequences.
//
// A pass is padded to one of a few shapes. The first of a shape runs eagerly, the second captures a
// graph, and later ones replay it: all with the same operations on the same shapes, so the bits of
// a row do not depend on it. They may differ from those of a pass that is not padded, as products
// of another number of rows do.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DECODE_GRAPHS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DECODE_GRAPHS_H_

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/model.h"
#include "common/model/passes/decode_buffers.h"
#include "common/model/passes/kv_cache.h"
#include "common/tensor/aten/device_graph.h"
#include "common/tensor/dtype.h"
#include "services/rollout/engine/models/model_runner.h"

namespace tandem::rollout {

class DecodeGraphs {
 public:
  // UNIMPLEMENTED if passes of the model with a cache of this type cannot be captured on its
  // device.
  static absl::Status CheckSupported(const Model& model, DType cache_dtype);

  // `model` and `cache` outlive the object. Sequences have at most `max_tokens` tokens.
  DecodeGraphs(const Model& model, KvCache& cache, int64_t max_tokens);

  // Whether a pass is one of decoding: few rows of each sequence, kMaxDecodeRows in all, of text,
  // of which no experts are recorded, and all of which are drawn on the device.
  bool Takes(const Pass& pass) const;

  // Runs a pass, which Takes, on the current stream, which is always the same one and no default
  // stream. The last pass but one has ended. `drawn` as in Model::Decode. Returns what DrawTokens
  // does for its rows, in a tensor that the next pass overwrites behind its own work. Errors of
  // Model::Decode and of libtorch; block copies are the caller's.
  absl::StatusOr<at::Tensor> Run(const Pass& pass, const at::Tensor& drawn = {});

  // Forgets the graphs: the model has weights in other memory.
  void Forget() { graphs_.clear(); }

 private:
  struct Key {
    DecodeShape shape;
    bool has_cuts = false;

    auto operator<=>(const Key&) const = default;
  };
  struct Captured {
    std::unique_ptr<DeviceGraph> graph;  // nullptr: the shape has run once
    at::Tensor drawn;
  };

  // Computes and draws what the buffers have.
  at::Tensor Compute(const Key& key) const;
  absl::Status Capture(const Key& key, Captured& captured);

  const Model& model_;
  KvCache& cache_;
  DecodeBuffers buffers_;
  std::map<Key, Captured> graphs_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_DECODE_GRAPHS_H_
