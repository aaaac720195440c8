// Protobuf messages of tandem.types.v1 and their plain structs. Conversions from the wire check
// what the wire can get wrong (types, sizes, enum values) and name the field; ranges and laws are
// the business of the engines.
#ifndef TANDEM_COMMON_RPC_CONVERT_PROTO_CONVERT_H_
#define TANDEM_COMMON_RPC_CONVERT_PROTO_CONVERT_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/files/shared_file.h"
#include "common/coauthoring/author.h"
#include "common/coauthoring/tandem_config.h"
#include "common/coauthoring/trajectory.h"
#include "common/model/model_summary.h"
#include "common/tensor/dtype.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weight_transfer.h"
#include "common/weights/weights_version.h"
#include "tandem/types/v1/sampling.pb.h"
#include "tandem/types/v1/server.pb.h"
#include "tandem/types/v1/tensor.pb.h"
#include "tandem/types/v1/trajectory.pb.h"
#include "tandem/types/v1/vision.pb.h"
#include "tandem/weights/v1/weights.pb.h"

namespace tandem::rpc {

// A chunk of a weight transfer, which fits a message with room to spare.
inline constexpr int64_t kMaxChunkBytes = 3 << 20;

// Errors of all functions: INVALID_ARGUMENT with the path inside the message ("dtype",
// "sampling.temperature"); callers prepend their own part.

// FLOAT32, one dimension. NaN and infinities pass: what they mean is the reader's business.
void FloatsToProto(std::span<const float> values, types::v1::Tensor* tensor);
absl::StatusOr<std::vector<float>> FloatsFromProto(const types::v1::Tensor& tensor);

// The number of elements of a shape; negative and overflowing extents are refused.
absl::StatusOr<int64_t> CountElements(const google::protobuf::RepeatedField<int64_t>& shape);

types::v1::DataType DTypeToProto(DType dtype);  // UNSPECIFIED for one the wire does not have
absl::StatusOr<DType> DTypeFromProto(types::v1::DataType dtype);

// Fields that are not set keep the value they have in `defaults`.
absl::StatusOr<TandemConfig> TandemConfigFromProto(const types::v1::TandemConfig& proto,
                                                   TandemConfig defaults);
// Sets every field.
void TandemConfigToProto(const TandemConfig& config, types::v1::TandemConfig* proto);

// Fields that are not set take the defaults of sampling.proto; max_tokens is required.
absl::StatusOr<SamplingParams> SamplingParamsFromProto(const types::v1::SamplingParams& proto);
void SamplingParamsToProto(const SamplingParams& params, types::v1::SamplingParams* proto);

void TrajectoryToProto(const Trajectory& trajectory, types::v1::Trajectory* proto);
// Refuses a trajectory in which a required field is missing or has the wrong number of entries.
absl::StatusOr<Trajectory> TrajectoryFromProto(const types::v1::Trajectory& proto);

// Sets both tensors, [distributions, count].
void TopTokensToProto(const TopTokens& tokens, types::v1::Tensor* ids, types::v1::Tensor* logprobs);

// The authors of the bytes of a mask. INVALID_ARGUMENT with "field[i]".
absl::StatusOr<std::vector<Author>> AuthorsFromProto(absl::string_view field,
                                                     const std::string& mask);

// Copies what the wire says; digests are checked where blobs are looked up, and grids where prompts
// are. INVALID_ARGUMENT with "vision_inputs[i].kind".
absl::StatusOr<std::vector<VisionReference>> VisionInputsFromProto(
    const google::protobuf::RepeatedPtrField<types::v1::VisionInput>& protos);
// Appends to `protos`.
void VisionInputsToProto(std::span<const VisionReference> inputs,
                         google::protobuf::RepeatedPtrField<types::v1::VisionInput>* protos);

void WeightsVersionToProto(const WeightsVersion& weights, types::v1::WeightsVersion* proto);
WeightsVersion WeightsVersionFromProto(const types::v1::WeightsVersion& proto);

void ModelSummaryToProto(const ModelSummary& summary, types::v1::ModelInfo* proto);

void WeightManifestToProto(const WeightManifest& manifest, weights::v1::WeightManifest* proto);
SharedFile SharedFileFromProto(const weights::v1::SharedFile& proto);
void SharedFileToProto(const SharedFile& file, weights::v1::SharedFile* proto);
GpuMemory GpuMemoryFromProto(const weights::v1::GpuMemory& proto);
void GpuMemoryToProto(const GpuMemory& memory, weights::v1::GpuMemory* proto);
// The memories of a BeginUpdateRequest or an UploadWeightsRequest: a single one has a field of its
// own.
template <typename Request>
std::vector<GpuMemory> GpuMemoriesFromProto(const Request& request) {
  std::vector<GpuMemory> memories;
  if (request.has_gpu_memory()) memories.push_back(GpuMemoryFromProto(request.gpu_memory()));
  for (const auto& memory : request.gpu_memories()) memories.push_back(GpuMemoryFromProto(memory));
  return memories;
}
template <typename Request>
void GpuMemoriesToProto(absl::Span<const GpuMemory> memories, Request* request) {
  for (const GpuMemory& memory : memories) {
    GpuMemoryToProto(
        memory, memories.size() == 1 ? request->mutable_gpu_memory() : request->add_gpu_memories());
  }
}
// Checks names (present, unique), dtypes, shapes, the total and the digest's form.
absl::StatusOr<WeightManifest> WeightManifestFromProto(const weights::v1::WeightManifest& proto);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CONVERT_PROTO_CONVERT_H_
