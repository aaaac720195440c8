#include "services/rollout/engine/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tandem::rollout {
namespace {

constexpr Author S = Author::kSenior;
constexpr Author J = Author::kJunior;

std::unique_ptr<Prompt> MakePrompt(int length, int samples, bool other_logprobs = false) {
  auto prompt = std::make_unique<Prompt>();
  prompt->request.prompt_token_ids.assign(length, 1);
  prompt->request.tandem = {.selection_strategy = SelectionStrategy::kAlternating};
  prompt->request.return_other_logprobs = other_logprobs;
  for (int i = 0; i < samples; ++i) {
    prompt->samples.push_back(
        std::make_unique<Sequence>(prompt.get(), i, std::make_shared<TokenSet>()));
    prompt->samples.back()->lane(S).slot = i;
    prompt->samples.back()->lane(J).slot = i;
  }
  return prompt;
}

void Write(Sequence& sequence) {
  sequence.authors.push_back(sequence.selector.NextAuthor());
  sequence.tokens.push_back(7);
  sequence.other_logprobs.push_back(NAN);
  sequence.selector.OnToken(7);
}

// Limits that no test reaches.
constexpr SchedulerLimits kWide = {.max_num_seqs = 1000, .max_batched_tokens = 100'000};

TEST(SchedulerTest, AdmitsInOrderUpToTheLimit) {
  const auto prompt = MakePrompt(3, 3);
  Scheduler scheduler({.max_num_seqs = 2, .max_batched_tokens = kWide.max_batched_tokens});
  for (const auto& sample : prompt->samples) scheduler.Enqueue(sample.get());
  const auto begun = scheduler.Admit();
  ASSERT_EQ(begun.size(), 2u);
  EXPECT_EQ(begun[0], prompt->samples[0].get());
  EXPECT_TRUE(scheduler.Admit().empty());
  scheduler.Remove(begun[0]);
  EXPECT_EQ(scheduler.Admit()[0], prompt->samples[2].get());
}

TEST(SchedulerTest, OnlyTheNextAuthorRuns) {
  const auto prompt = MakePrompt(4, 1);
  Scheduler scheduler(kWide);
  scheduler.Enqueue(prompt->samples[0].get());
  scheduler.Admit();
  EXPECT_TRUE(scheduler.Plan(J).empty());
  const auto pass = scheduler.Plan(S);
  ASSERT_EQ(pass.size(), 1u);
  EXPECT_EQ(pass[0].end, 4);
  EXPECT_TRUE(pass[0].samples);
  EXPECT_EQ(pass[0].num_output_rows, 1);
  scheduler.Advance(S, pass[0]);
  Write(*prompt->samples[0]);
  EXPECT_TRUE(scheduler.Plan(S).empty());
  // The junior has seen nothing: it consumes the prompt and the senior's token at once.
  EXPECT_EQ(scheduler.Plan(J)[0].end, 5);
}

TEST(SchedulerTest, LongPromptsAreCutToTheBudget) {
  const auto prompt = MakePrompt(10, 1);
  Scheduler scheduler({.max_num_seqs = kWide.max_num_seqs, .max_batched_tokens = 4});
  scheduler.Enqueue(prompt->samples[0].get());
  scheduler.Admit();
  std::vector<int64_t> ends;
  for (int i = 0; i < 3; ++i) {
    const auto pass = scheduler.Plan(S);
    ASSERT_EQ(pass.size(), 1u);
    EXPECT_EQ(pass[0].samples, i == 2);
    EXPECT_EQ(pass[0].num_output_rows, i == 2 ? 1 : 0);
    ends.push_back(pass[0].end);
    scheduler.Advance(S, pass[0]);
  }
  EXPECT_THAT(ends, ::testing::ElementsAre(4, 8, 10));
}

TEST(SchedulerTest, SamplesWaitForTheFirstOnesPromptAndTakeItOver) {
  const auto prompt = MakePrompt(6, 3);
  Scheduler scheduler(kWide);
  for (const auto& sample : prompt->samples) scheduler.Enqueue(sample.get());
  scheduler.Admit();
  const auto first = scheduler.Plan(S);
  ASSERT_EQ(first.size(), 1u);
  scheduler.Advance(S, first[0]);
  Write(*first[0].sequence);
  const auto second = scheduler.Plan(S);
  ASSERT_EQ(second.size(), 2u);
  for (const PassEntry& entry : second) {
    EXPECT_EQ(entry.copy_prefix_from, prompt->samples[0].get());
    EXPECT_EQ(entry.begin, 5);
    EXPECT_EQ(entry.end, 6);
    EXPECT_TRUE(entry.samples);
  }
}

TEST(SchedulerTest, PrefixesOfOldWeightsAreNotTakenOver) {
  const auto prompt = MakePrompt(6, 2);
  Scheduler scheduler(kWide);
  for (const auto& sample : prompt->samples) scheduler.Enqueue(sample.get());
  scheduler.Admit();
  const auto first = scheduler.Plan(S);
  scheduler.Advance(S, first[0]);
  Write(*first[0].sequence);
  scheduler.BumpEpoch(S, /*recompute=*/false);
  const auto second = scheduler.Plan(S);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].copy_prefix_from, nullptr);
  EXPECT_EQ(second[0].begin, 0);
}

TEST(SchedulerTest, AnEndedSequenceDrainsTheLaggingLane) {
  const auto prompt = MakePrompt(3, 1, /*other_logprobs=*/true);
  Sequence& sequence = *prompt->samples[0];
  Scheduler scheduler(kWide);
  scheduler.Enqueue(&sequence);
  scheduler.Admit();
  scheduler.Advance(S, scheduler.Plan(S)[0]);
  Write(sequence);
  sequence.finish_reason = FinishReason::kLength;
  EXPECT_FALSE(sequence.complete());
  EXPECT_TRUE(scheduler.Plan(S).empty());
  const auto drain = scheduler.Plan(J);
  ASSERT_EQ(drain.size(), 1u);
  EXPECT_EQ(drain[0].end, 3);  // the last token predicts nothing
  EXPECT_FALSE(drain[0].samples);
  EXPECT_EQ(drain[0].num_output_rows, 1);
  scheduler.Advance(J, drain[0]);
  EXPECT_TRUE(sequence.complete());
}

}  // namespace
}  // namespace tandem::rollout
