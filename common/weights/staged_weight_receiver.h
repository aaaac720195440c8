// A WeightReceiver (weight_transfer.h) that collects new weights in memory beside those that serve.
// It knows bytes, names and shapes; the engine puts the weights in force.
#ifndef TANDEM_COMMON_WEIGHTS_STAGED_WEIGHT_RECEIVER_H_
#define TANDEM_COMMON_WEIGHTS_STAGED_WEIGHT_RECEIVER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/checksum.h"
#include "common/weights/weight_transfer.h"

namespace tandem {

class StagedWeightReceiver : public WeightReceiver {
 public:
  // Puts verified weights in force; blocks. `stream` holds the manifest's byte stream.
  using Apply = std::function<absl::Status(
      const WeightManifest& manifest, absl::Span<const std::byte> stream, const CallScope& call)>;

  // `parameters` has the name and shape of every parameter of the model; dtypes are not compared,
  // as any floating type is converted. `optional` is a parameter that a manifest may leave out (a
  // tied head). `num_token_ids`: those of the model, which a sender's model must have too.
  StagedWeightReceiver(std::vector<WeightSpec> parameters, std::optional<WeightSpec> optional,
                       int64_t num_token_ids, WeightsVersion initial, Apply apply);

  absl::StatusOr<int64_t> Begin(const std::string& update_id, const WeightManifest& manifest,
                                bool allow_rollback) override;
  absl::StatusOr<int64_t> Append(const std::string& update_id, int64_t chunk_index,
                                 absl::Span<const std::byte> data) override;
  absl::StatusOr<WeightsVersion> Commit(const std::string& update_id,
                                        const CallScope& call) override;
  absl::Status Abort(const std::string& update_id) override;
  WeightsVersion Version() const override;
  std::string OpenUpdateId() const override;

 private:
  struct Update {
    std::string id;
    WeightManifest manifest;
    std::unique_ptr<std::byte[]> bytes;
    int64_t received = 0;  // bytes, always a number of whole chunks
    Checksum digest;
    bool committing = false;

    int64_t next_chunk() const {
      return (received + manifest.chunk_bytes - 1) / manifest.chunk_bytes;
    }
  };

  absl::Status CheckManifest(const WeightManifest& manifest) const;
  absl::StatusOr<Update*> FindOpenLocked(const std::string& update_id);

  const std::vector<WeightSpec> parameters_;
  const std::optional<WeightSpec> optional_;
  const int64_t num_token_ids_;
  const Apply apply_;

  mutable std::mutex mutex_;
  std::condition_variable commit_ended_;
  std::unique_ptr<Update> open_;
  WeightsVersion version_;
  std::string last_committed_id_;
  // The update that a rollback replaced, until a higher version is committed. Its sender, of the
  // former run, may not know of the rollback yet.
  std::string overtaken_id_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_STAGED_WEIGHT_RECEIVER_H_
