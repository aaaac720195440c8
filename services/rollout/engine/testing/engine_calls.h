// For tests: calls of an engine that wait for their results.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_ENGINE_CALLS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_ENGINE_CALLS_H_

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/model/model.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/weights/testing/stream_digest.h"
#include "services/rollout/engine/engine.h"
#include "services/rollout/engine/testing/recording_listener.h"

namespace tandem::rollout {

// Submits the requests as one batch, and returns a listener for each.
inline std::vector<std::shared_ptr<RecordingListener>> Submit(
    Engine& engine, const std::vector<PromptRequest>& requests,
    std::vector<PromptId>* ids = nullptr) {
  std::vector<std::shared_ptr<RecordingListener>> listeners;
  std::vector<Submission> batch;
  for (const PromptRequest& request : requests) {
    listeners.push_back(std::make_shared<RecordingListener>(request.num_samples));
    batch.push_back({request, listeners.back()});
  }
  const auto submitted = engine.Submit(std::move(batch));
  EXPECT_TRUE(submitted.ok()) << submitted.status();
  if (ids != nullptr && submitted.ok()) *ids = *submitted;
  return listeners;
}

// Returns the response to a request for one sample.
inline Trajectory RunOne(Engine& engine, const PromptRequest& request) {
  const auto listener = Submit(engine, {request})[0];
  listener->Wait();
  EXPECT_EQ(listener->failure(), std::nullopt);
  return listener->finished().at(0);
}

// Waits for the scores.
inline absl::StatusOr<ScoreResult> Score(Engine& engine, ScoreRequest request,
                                         const CallScope& call = {}) {
  std::promise<absl::StatusOr<ScoreResult>> done;
  const absl::Status queued =
      engine.Score(std::move(request), call,
                   [&](absl::StatusOr<ScoreResult> result) { done.set_value(std::move(result)); });
  if (!queued.ok()) return queued;
  return done.get_future().get();
}

// Returns the byte stream and the manifest of a model's float32 parameters, sent in `types`.
inline WeightManifest ManifestOf(const Model& model, int64_t version,
                                 std::vector<std::byte>& stream, const TensorTypes& types = {}) {
  WeightManifest manifest = {.version = version, .tensors = {}, .total_bytes = 0, .digest = ""};
  TensorSums whole;
  for (const auto& [name, tensor] : model.Parameters()) {
    const at::Tensor wide = tensor.contiguous();
    whole.AddTensor(name, wide.const_data_ptr(), static_cast<int64_t>(wide.nbytes()));
    const auto type = types.find(name);
    manifest.tensors.push_back({.name = name,
                                .dtype = type == types.end() ? DType::kFloat32 : type->second,
                                .shape = wide.sizes().vec()});
    const at::Tensor values = wide.to(ToScalarType(manifest.tensors.back().dtype));
    const size_t begin = stream.size();
    stream.resize(begin + values.nbytes());
    std::memcpy(stream.data() + begin, values.const_data_ptr(), values.nbytes());
  }
  manifest.total_bytes = static_cast<int64_t>(stream.size());
  manifest.chunk_bytes = manifest.total_bytes;
  manifest.digest = whole.Digest();
  manifest.num_token_ids = model.num_token_ids();
  if (!types.empty()) manifest.sent_digest = StreamDigest(manifest.tensors, stream);
  return manifest;
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_ENGINE_CALLS_H_
