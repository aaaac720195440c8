// For tests: a generator over two models that are hashes.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_GENERATOR_HARNESS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_GENERATOR_HARNESS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/coauthoring/vocabulary.h"
#include "services/rollout/engine/schedule/generator.h"
#include "services/rollout/engine/testing/fake_runner.h"
#include "services/rollout/engine/testing/recording_listener.h"
#include "services/rollout/engine/testing/requests.h"

namespace tandem::rollout {

inline constexpr int32_t kVocab = 40;
inline constexpr int32_t kEos = 39;

// Ids 0-9 start words, 10-14 end sentences.
inline const std::vector<int32_t> kWordIds = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
inline const std::vector<int32_t> kSentenceIds = {10, 11, 12, 13, 14};

inline TandemConfig Tandem(SelectionStrategy strategy, double prob_senior = 0.5) {
  TandemConfig config = {.selection_strategy = strategy,
                         .prob_senior = prob_senior,
                         .chunk_size = 3,
                         .max_gap_tokens = 4};
  if (strategy == SelectionStrategy::kSentence) config.boundary_token_ids = kSentenceIds;
  if (strategy == SelectionStrategy::kWord) config.boundary_token_ids = kWordIds;
  return config;
}

inline PromptRequest Request(const TandemConfig& tandem, int prompt_length = 5,
                             uint64_t seed = 11) {
  PromptRequest request;
  std::mt19937 random(static_cast<uint32_t>(seed));
  for (int i = 0; i < prompt_length; ++i) {
    request.prompt_token_ids.push_back(static_cast<int32_t>(random() % kVocab));
  }
  request.sampling.max_tokens = 30;
  request.tandem = tandem;
  request.seed = seed;
  return request;
}

// Heads of the senior's speculator. A test that uses them sets FakeRunner::keep_rows.
inline constexpr int64_t kHeads = 4;

// The text of an id.
inline std::string PieceOf(int32_t id) { return absl::StrCat("<", id, ">"); }

// Words that are their ids.
inline const Vocabulary& HarnessVocabulary() {
  static const auto* const vocabulary = [] {
    nlohmann::json vocab = nlohmann::json::object();
    for (int32_t id = 0; id < kVocab; ++id) vocab[PieceOf(id)] = id;
    const nlohmann::json file = {{"model", {{"type", "WordLevel"}, {"vocab", vocab}}}};
    return new Vocabulary(Vocabulary::Parse(file.dump()).value());
  }();
  return *vocabulary;
}

// Limits that no test reaches.
inline constexpr SchedulerLimits kWide = {
    .max_num_seqs = 1000, .max_batched_tokens = 100'000, .num_blocks = {2000, 2000}};

inline SchedulerLimits Limits(int64_t max_num_seqs,
                              int64_t max_batched_tokens = kWide.max_batched_tokens,
                              int64_t num_blocks = kWide.num_blocks[0]) {
  return {max_num_seqs, max_batched_tokens, {num_blocks, num_blocks}};
}

class Harness {
 public:
  explicit Harness(SchedulerLimits limits = kWide, uint64_t senior_weights = 1,
                   uint64_t junior_weights = 2, bool eager_lanes = false,
                   DrafterFactory make_drafter = MakeDrafter)
      : boundaries(Vocabulary(), {}),
        senior(senior_weights, kVocab, limits.num_blocks[0]),
        junior(junior_weights, kVocab, limits.num_blocks[1]),
        generator(OptionsOf(limits, eager_lanes, std::move(make_drafter)), &boundaries, &senior,
                  &junior) {}

  std::shared_ptr<RecordingListener> Submit(const PromptRequest& request, uint64_t stream = 0) {
    auto listener = std::make_shared<RecordingListener>(request.num_samples);
    generator.Submit(next_id_++, {request, listener, stream});
    return listener;
  }
  void Finish() {
    for (int steps = 0; generator.HasWork(); ++steps) {
      ASSERT_LT(steps, 10000) << "no progress";
      generator.Step();
    }
    EXPECT_EQ(Stats().senior_kv_tokens, 0);
    EXPECT_EQ(Stats().junior_kv_tokens, 0);
    EXPECT_EQ(senior.misuses + junior.misuses, 0);
  }
  EngineStats Stats() const {
    EngineStats stats;
    generator.FillStats(stats);
    return stats;
  }
  Trajectory Run(const PromptRequest& request) {
    const auto listener = Submit(request);
    Finish();
    EXPECT_EQ(listener->failure(), std::nullopt);
    return listener->finished().at(0);
  }

  BoundarySets boundaries;
  FakeRunner senior;
  FakeRunner junior;
  Generator generator;

 private:
  static GeneratorOptions OptionsOf(const SchedulerLimits& limits, bool eager_lanes,
                                    DrafterFactory make_drafter) {
    GeneratorOptions options = {.limits = limits,
                                .request_limits = {.max_model_len = 100,
                                                   .junior_max_model_len = 100,
                                                   .has_junior = true,
                                                   .speculator_heads = kHeads},
                                .eos_token_ids = {kEos},
                                .vocabulary = &HarnessVocabulary(),
                                .senior_weights = {0, "zero"},
                                .junior_version = "junior",
                                .eager_lanes = eager_lanes};
    options.make_drafter = std::move(make_drafter);
    return options;
  }

  PromptId next_id_ = 1;
};

inline void ExpectSame(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.response_token_ids, b.response_token_ids);
  EXPECT_EQ(a.authorship_mask, b.authorship_mask);
  EXPECT_EQ(a.author_logprobs, b.author_logprobs);
  EXPECT_EQ(a.other_logprobs, b.other_logprobs);
  EXPECT_EQ(a.log_keep_mass, b.log_keep_mass);
  EXPECT_EQ(a.finish_reason, b.finish_reason);
}

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_GENERATOR_HARNESS_H_
