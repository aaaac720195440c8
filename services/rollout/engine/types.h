// Options, requests and results of the rollout engine: plain structs, no tensors, no gRPC.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TYPES_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TYPES_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "common/base/machine/rank_environment.h"
#include "common/base/steady_time.h"
#include "common/coauthoring/tandem_config.h"
#include "common/coauthoring/trajectory.h"
#include "common/model/config/compute_options.h"
#include "common/model/config/lora.h"
#include "common/model/config/quantization.h"
#include "common/model/model_summary.h"
#include "common/ranks/monitor/rank_timeouts.h"
#include "common/tensor/dtype.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weights_version.h"
#include "services/rollout/engine/ranks/rank_layout.h"

namespace tandem::rollout {

enum class OnWeightUpdate {
  kRecompute,  // the senior consumes running sequences again, with the new weights
  kKeep,       // the old KV entries stay
};

// A lane: one of the two models of the server, and how it is held.
struct LaneOptions {
  std::string model;  // Hugging Face directory; empty: no junior
  // How linear maps are stored (services/rollout/engine/blocks/lane_storage.h).
  DType dtype;
  Quantization quantization;
  int64_t max_model_len;            // longest sequence; the model's own limit applies, too
  std::string model_revision = {};  // commit of the snapshot that `model` must be; empty: any
  LoraOptions lora = {};            // of the senior
  // Fraction of its GPU's memory that the lane may take; nullopt: what is free.
  std::optional<double> gpu_memory_utilization = std::nullopt;
  DType activation_dtype = DType::kFloat32;  // that linear maps round their inputs to
  bool enforce_eager = true;                 // without captured graphs (models/decode_graphs.h)
};

// From the resolved configuration (services/rollout/service/convert.h).
struct EngineOptions {
  LaneOptions senior;
  LaneOptions junior;
  std::string senior_speculator = {};  // directory (common/speculator); empty: none
  TandemConfig tandem;                 // defaults of a request
  int64_t max_num_seqs;
  int64_t max_batched_tokens;
  bool eager_lanes = false;  // of tests: see GeneratorOptions
  int64_t max_queue;
  OnWeightUpdate on_weight_update;
  bool allow_not_finite_weights = false;  // serve updates with values that are not finite
  ComputeOptions compute;
  ranks::RankTimeouts rank_timeouts;
  RankLayout layout = {};
  RankEnvironment environment = {};  // of this process among the ranks of the server
  int64_t kv_cache_bytes = 0;        // of both lanes; 0: chosen by the server
  std::optional<DType> kv_cache_dtype = std::nullopt;  // nullopt: that of the lane's activations
  int64_t blob_cache_bytes = 0;  // most bytes of pixels that the server keeps, if it takes images
  // The memory that this rank may take, from which a server without kv_cache_bytes chooses the size
  // of the cache. The engine asks a GPU itself (JoinRanks).
  FreeMemory free_memory = {};
  // The settings that must be equal on every rank, as lines of text.
  std::string configuration = {};
};

// Source of the drafts of a sequence (drafter.h).
enum class SpeculativeMethod {
  kNone,
  kNgram,   // earlier occurrences of its last tokens
  kJunior,  // the junior, for tokens of the senior
  kHeads,   // the heads of the senior's speculator
};

// Condition under which a draft is accepted.
enum class AcceptanceRule {
  kExact,              // if it equals the token that is drawn in its place
  kRejectionSampling,  // with probability min(1, p / q); at temperature 0 as kExact
};

inline constexpr int64_t kMaxSpeculativeTokens = 15;
inline constexpr int64_t kMaxPromptLookup = 16;

// Speculative decoding of one prompt. With kExact a response does not depend on it, and with
// kRejectionSampling its distribution does not.
struct SpeculativeParams {
  SpeculativeMethod method = SpeculativeMethod::kNone;
  int64_t num_speculative_tokens = 5;  // most drafts of a pass, up to kMaxSpeculativeTokens
  // kNgram: number of tokens of a suffix that is looked for, up to kMaxPromptLookup.
  int64_t prompt_lookup_min = 2;
  int64_t prompt_lookup_max = 4;
  AcceptanceRule acceptance_rule = AcceptanceRule::kExact;
};

inline constexpr int32_t kMaxTopLogprobs = 128;

// One prompt and its samples.
struct PromptRequest {
  std::vector<int32_t> prompt_token_ids;
  // The response so far, which is continued; the authors of its tokens.
  std::vector<int32_t> response_token_ids = {};
  std::vector<Author> response_authors = {};
  SamplingParams sampling;
  TandemConfig tandem;  // resolved: the caller has merged the request over the defaults
  uint64_t seed = 0;
  int64_t num_samples = 1;
  uint64_t first_sample_index = 0;
  bool return_other_logprobs = false;
  bool return_routed_experts = false;
  int32_t num_top_logprobs = 0;  // up to kMaxTopLogprobs
  bool stream_tokens = false;
  int32_t priority = 0;  // higher comes first (waiting_queue.h)
  SpeculativeParams speculative;
  std::vector<VisionReference> vision_inputs = {};  // in the order of their tokens
  Blobs blobs = {};                                 // their pixels
  SteadyTime deadline = SteadyTime::InfiniteFuture();

  // Number of tokens that the lanes are given: prompt and response so far.
  int64_t given_tokens() const {
    return std::ssize(prompt_token_ids) + std::ssize(response_token_ids);
  }
};

// New tokens of one sample.
struct TokensDelta {
  uint64_t sample_index = 0;
  int64_t offset = 0;  // position of the first of these tokens in the response
  std::vector<int32_t> token_ids;
  std::vector<Author> authorship_mask;
};

// Drafts that passes verified, and how many of them were accepted.
struct DraftCounts {
  int64_t drafted = 0;
  int64_t accepted = 0;

  bool operator==(const DraftCounts&) const = default;
};

// The drafts of one sample.
struct SampleDrafts {
  DraftCounts counts;
  // One per new response token: 1 = an accepted draft. Empty if the prompt asks for no drafts.
  std::vector<uint8_t> accepted_mask;

  bool operator==(const SampleDrafts&) const = default;
};

// DraftCounts of many passes, by the place of a draft behind the last token.
struct DraftTotals {
  std::array<DraftCounts, kMaxSpeculativeTokens> by_position = {};

  // Counts the drafts of one pass. The accepted ones are the first.
  void Add(int64_t drafted, int64_t accepted) {
    for (int64_t i = 0; i < drafted; ++i) {
      ++by_position[i].drafted;
      by_position[i].accepted += i < accepted;
    }
  }
  DraftCounts Sum() const {
    DraftCounts sum;
    for (const DraftCounts& counts : by_position) {
      sum.drafted += counts.drafted;
      sum.accepted += counts.accepted;
    }
    return sum;
  }
};

// Receives the events of one prompt. Called on the engine thread: it must not block.
class PromptListener {
 public:
  virtual ~PromptListener() = default;
  // Called with stream_tokens alone.
  virtual void OnTokens(TokensDelta delta) = 0;
  // Called once for every sample, in any order.
  virtual void OnFinished(Trajectory trajectory, SampleDrafts drafts) = 0;
  // Called at most once, in place of the samples that have not finished: CANCELLED,
  // DEADLINE_EXCEEDED, INTERNAL. No call follows.
  virtual void OnFailed(absl::Status status) = 0;
};

using PromptId = uint64_t;  // never reused

struct Submission {
  PromptRequest request;
  std::shared_ptr<PromptListener> listener;
  // The client's call: streams of equal priority share the engine (waiting_queue.h).
  uint64_t stream = 0;
};

struct ScoreSequence {
  std::vector<int32_t> token_ids;
  int64_t first_scored_token = 1;
  // The images of the tokens before first_scored_token, in their order.
  std::vector<VisionReference> vision_inputs = {};
};

struct ScoreRequest {
  std::vector<ScoreSequence> sequences;
  bool senior = true;
  bool junior = false;
  double temperature = 1.0;
  int32_t num_top_logprobs = 0;  // up to kMaxTopLogprobs
  Blobs blobs = {};              // of the sequences' images
};

struct SequenceScores {
  // One per token from first_scored_token on; empty if not requested.
  std::vector<float> senior_logprobs;
  std::vector<float> junior_logprobs;
  TopTokens senior_top_tokens = {}, junior_top_tokens = {};
};

struct ScoreResult {
  std::vector<SequenceScores> sequences;
  WeightsVersion weights;  // of the senior, the same for all sequences
};

// Receives the result. Called once, on the engine thread: it must not block.
using ScoreDone = std::function<void(absl::StatusOr<ScoreResult> result)>;

// Totals since the start (…_total), and the current state.
struct EngineStats {
  int64_t sequences_running = 0;
  int64_t sequences_waiting = 0;
  int64_t senior_kv_tokens = 0;  // room of the blocks that sequences hold in the senior's lane
  int64_t junior_kv_tokens = 0;
  int64_t kv_capacity_tokens = 0;   // of the senior's lane
  int64_t senior_tokens_total = 0;  // response tokens written
  int64_t junior_tokens_total = 0;
  int64_t handoffs_total = 0;  // changes of author inside a response
  // Response tokens of the other author that a lane consumed.
  int64_t senior_catch_up_tokens_total = 0;
  int64_t junior_catch_up_tokens_total = 0;
  int64_t prompt_tokens_total = 0;
  // Tokens that a lane did not consume, because the cache contained them.
  int64_t shared_prefix_tokens_total = 0;
  int64_t preemptions_total = 0;     // of sequences that gave up their blocks
  int64_t forward_passes_total = 0;  // of generation
  DraftTotals ngram_drafts_total;
  DraftTotals junior_drafts_total;
  DraftTotals heads_drafts_total;
  int64_t score_passes_total = 0;
  // The end of the last pass or command on this rank.
  SteadyTime last_progress = SteadyTime::InfinitePast();
  bool paused = false;
};

struct EngineInfo {
  ModelSummary senior;
  std::optional<ModelSummary> junior;
  std::string junior_version;    // digest of the junior's weights
  int64_t speculator_heads = 0;  // most drafts of kHeads in a row; 0: there is no speculator
  std::vector<int32_t> sentence_boundary_token_ids;
  std::vector<int32_t> word_boundary_token_ids;
  int64_t max_num_seqs = 0;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TYPES_H_
