#include "services/rollout/engine/schedule/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "common/model/passes/layer_cache.h"

namespace tandem::rollout {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Author S = Author::kSenior;
constexpr Author J = Author::kJunior;

// Limits that no test reaches.
constexpr SchedulerLimits kWide = {
    .max_num_seqs = 1000, .max_batched_tokens = 100'000, .num_blocks = {1000, 1000}};

struct PromptOptions {
  bool tandem = true;
  bool other_logprobs = false;
  int32_t token = 1;
  int32_t priority = 0;
};

std::unique_ptr<Prompt> MakePrompt(int length, int samples, const PromptOptions& options = {}) {
  auto prompt = std::make_unique<Prompt>();
  prompt->request.prompt_token_ids.assign(length, options.token);
  prompt->request.tandem = {.enabled = options.tandem,
                            .selection_strategy = SelectionStrategy::kAlternating};
  prompt->request.return_other_logprobs = options.other_logprobs;
  prompt->request.priority = options.priority;
  for (int i = 0; i < samples; ++i) {
    prompt->samples.push_back(
        std::make_unique<Sequence>(prompt.get(), i, std::make_shared<TokenSet>()));
  }
  return prompt;
}

void Enqueue(Scheduler& scheduler, const Prompt& prompt) {
  for (const auto& sample : prompt.samples) scheduler.Enqueue(sample.get());
}

void Write(Sequence& sequence) {
  sequence.authors.push_back(sequence.selector.NextAuthor());
  sequence.tokens.push_back(7);
  sequence.other_logprobs.push_back(NAN);
  sequence.selector.OnToken(7);
}

// Plans a pass, advances its entries and writes the tokens that they sample.
PassPlan RunPass(Scheduler& scheduler, Author lane) {
  PassPlan plan = scheduler.Plan(lane);
  for (const PassEntry& entry : plan.entries) {
    scheduler.Advance(lane, entry);
    if (entry.draws > 0) Write(*entry.sequence);
  }
  return plan;
}

std::vector<const Sequence*> Sequences(const PassPlan& plan) {
  std::vector<const Sequence*> sequences;
  for (const PassEntry& entry : plan.entries) sequences.push_back(entry.sequence);
  return sequences;
}

TEST(SchedulerTest, AdmitsInOrderUpToTheLimit) {
  const auto prompt = MakePrompt(3, 3);
  Scheduler scheduler({.max_num_seqs = 2,
                       .max_batched_tokens = kWide.max_batched_tokens,
                       .num_blocks = kWide.num_blocks});
  Enqueue(scheduler, *prompt);
  EXPECT_THAT(scheduler.Admit(), ElementsAre(prompt.get()));
  EXPECT_THAT(scheduler.running(), ElementsAre(prompt->samples[0].get(), prompt->samples[1].get()));
  EXPECT_THAT(scheduler.Admit(), IsEmpty());
  scheduler.Remove(prompt->samples[0].get());
  EXPECT_THAT(scheduler.Admit(), IsEmpty()) << "the prompt has begun before";
  EXPECT_THAT(scheduler.running(), ElementsAre(prompt->samples[1].get(), prompt->samples[2].get()));
}

TEST(SchedulerTest, AdmitsAsManyAsThereAreBlocksFor) {
  const auto first = MakePrompt(100, 1), second = MakePrompt(100, 1, {.token = 2});
  Scheduler scheduler(
      {.max_num_seqs = 8, .max_batched_tokens = kWide.max_batched_tokens, .num_blocks = {3, 3}});
  Enqueue(scheduler, *first);
  Enqueue(scheduler, *second);
  EXPECT_THAT(scheduler.Admit(), ElementsAre(first.get()));
  RunPass(scheduler, S);
  EXPECT_THAT(scheduler.Admit(), IsEmpty());
  scheduler.Remove(first->samples[0].get());
  EXPECT_THAT(scheduler.Admit(), ElementsAre(second.get()));
}

TEST(SchedulerTest, OnlyTheNextAuthorRuns) {
  const auto prompt = MakePrompt(4, 1);
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  EXPECT_THAT(scheduler.Plan(J).entries, IsEmpty());
  const auto pass = RunPass(scheduler, S).entries;
  ASSERT_EQ(pass.size(), 1u);
  EXPECT_EQ(pass[0].end, 4);
  EXPECT_EQ(pass[0].draws, 1);
  EXPECT_THAT(scheduler.Plan(S).entries, IsEmpty());
  // The junior has seen nothing: it consumes the prompt and the senior's token at once.
  EXPECT_EQ(scheduler.Plan(J).entries[0].end, 5);
}

TEST(SchedulerTest, TheLaneWithMoreWaitingSequencesRunsFirstAndTheOtherSoon) {
  const auto solo = MakePrompt(4, 6, {.tandem = false}), tandem = MakePrompt(4, 1);
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *tandem);
  Enqueue(scheduler, *solo);
  scheduler.Admit();
  RunPass(scheduler, S);  // the first sample of each prompt
  RunPass(scheduler, S);  // all of solo's
  ASSERT_EQ(tandem->samples[0]->selector.NextAuthor(), J);
  int passes = 0;
  while (scheduler.LaneOrder()[0] == S) {
    ASSERT_LT(++passes, 8) << "the junior's sequence waits for ever";
    EXPECT_EQ(RunPass(scheduler, S).entries.size(), 6u);
  }
  EXPECT_GT(passes, 2) << "six sequences wait for one";
}

TEST(SchedulerTest, EqualLanesTakeTurns) {
  const auto prompt = MakePrompt(4, 1), other = MakePrompt(4, 1, {.token = 2});
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  EXPECT_EQ(scheduler.LaneOrder()[0], S);
  RunPass(scheduler, S);
  Enqueue(scheduler, *other);
  scheduler.Admit();
  // One sequence waits for each model.
  EXPECT_EQ(scheduler.LaneOrder()[0], J);
  RunPass(scheduler, J);
  EXPECT_EQ(scheduler.LaneOrder()[0], S);
}

TEST(SchedulerTest, LongPromptsAreCutToTheBudget) {
  const auto prompt = MakePrompt(10, 1);
  Scheduler scheduler({.max_num_seqs = kWide.max_num_seqs,
                       .max_batched_tokens = 4,
                       .num_blocks = kWide.num_blocks});
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  std::vector<int64_t> ends;
  for (int i = 0; i < 3; ++i) {
    const auto pass = RunPass(scheduler, S).entries;
    ASSERT_EQ(pass.size(), 1u);
    EXPECT_EQ(pass[0].draws, i == 2);
    ends.push_back(pass[0].end);
  }
  EXPECT_THAT(ends, ElementsAre(4, 8, 10));
}

TEST(SchedulerTest, ALongPromptDoesNotHoldUpSequencesThatAreWritten) {
  const auto prompt = MakePrompt(2, 1, {.tandem = false});
  const auto longer = MakePrompt(30, 1, {.token = 2});
  Scheduler scheduler({.max_num_seqs = kWide.max_num_seqs,
                       .max_batched_tokens = 4,
                       .num_blocks = kWide.num_blocks});
  Enqueue(scheduler, *longer);
  scheduler.Admit();
  RunPass(scheduler, S);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  // The older prompt takes the budget until it is read, but not from tokens that are due.
  while (prompt->samples[0]->response_length() == 0) RunPass(scheduler, S);
  const auto next = RunPass(scheduler, S);
  EXPECT_EQ(next.entries[0].sequence, prompt->samples[0].get());
  EXPECT_EQ(next.entries[0].draws, 1);
}

TEST(SchedulerTest, SamplesWaitForTheFirstOnesPromptAndTakeItOver) {
  const auto prompt = MakePrompt(70, 3);
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  const PassPlan first = RunPass(scheduler, S);
  ASSERT_EQ(first.entries.size(), 1u);
  EXPECT_THAT(first.copies, IsEmpty());
  const PassPlan second = RunPass(scheduler, S);
  ASSERT_EQ(second.entries.size(), 2u);
  ASSERT_EQ(second.copies.size(), 2u);
  const std::span<const int32_t> owner = prompt->samples[0]->lane(S).table.blocks();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(second.entries[i].begin, 69);
    EXPECT_EQ(second.entries[i].end, 70);
    EXPECT_EQ(second.entries[i].draws, 1);
    const std::span<const int32_t> blocks = prompt->samples[i + 1]->lane(S).table.blocks();
    EXPECT_EQ(blocks[0], owner[0]) << "whole blocks are shared";
    EXPECT_NE(blocks[1], owner[1]) << "the rest is copied";
    EXPECT_EQ(second.copies[i].from, owner[1]);
    EXPECT_EQ(second.copies[i].to, blocks[1]);
  }
  EXPECT_EQ(scheduler.num_held_blocks(S), 1 + 3);
  EXPECT_EQ(scheduler.shared_tokens_total(), 2 * 69);
}

// Proposes the token 7 as often as it may.
class SevensDrafter final : public Drafter {
 public:
  void Propose(std::span<const int32_t>, int64_t most, std::vector<int32_t>& drafts) override {
    drafts.resize(most, 7);
  }
};

// Returns a prompt whose samples have drafts, of the junior if `drafter` is null.
std::unique_ptr<Prompt> MakeDraftedPrompt(int length, int samples, const PromptOptions& options,
                                          bool junior = false) {
  auto prompt = MakePrompt(length, samples, options);
  prompt->max_response_tokens = 1000;
  SpeculativeParams& params = prompt->request.speculative;
  params = {.method = junior ? SpeculativeMethod::kJunior : SpeculativeMethod::kNgram,
            .num_speculative_tokens = kMaxSpeculativeTokens};
  for (const auto& sample : prompt->samples) {
    sample->drafts =
        std::make_unique<DraftState>(params, junior ? nullptr : std::make_unique<SevensDrafter>());
  }
  return prompt;
}

// Writes `accepted` of the entry's drafts and one more token.
void WriteWithDrafts(Scheduler& scheduler, Author lane, const PassEntry& entry, int64_t accepted) {
  for (int64_t i = 0; i <= accepted; ++i) Write(*entry.sequence);
  scheduler.Advance(lane, entry, entry.draws - 1 - accepted);
}

TEST(SchedulerTest, DraftsFillAPassUpToItsTokens) {
  const auto alone = MakeDraftedPrompt(10, 1, {.tandem = false});
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *alone);
  scheduler.Admit();
  const PassEntry read = scheduler.Plan(S).entries[0];
  EXPECT_EQ(read.end, 10 + 6) << "the prompt takes ten of the pass";
  EXPECT_EQ(read.draws, 1 + 6);
  WriteWithDrafts(scheduler, S, read, 2);
  EXPECT_EQ(alone->samples[0]->lane(S).cursor, 12);
  const PassEntry next = scheduler.Plan(S).entries[0];
  EXPECT_EQ(next.begin, 12);
  EXPECT_EQ(next.end, 13 + 15);
  EXPECT_EQ(next.draws, 16);
}

TEST(SchedulerTest, SequencesShareTheRoomForDrafts) {
  for (const int samples : {3, 16, 17}) {
    const auto prompt = MakeDraftedPrompt(1, samples, {.tandem = false});
    Scheduler scheduler(kWide);
    Enqueue(scheduler, *prompt);
    scheduler.Admit();
    const PassPlan plan = scheduler.Plan(S);
    int64_t total = 0;
    for (const PassEntry& entry : plan.entries) {
      EXPECT_LE(entry.draws, 1 + 5);
      EXPECT_GE(entry.draws, samples == 3 ? 1 + 4 : 1);
      total += entry.end - entry.begin;
    }
    EXPECT_EQ(total, std::max<int64_t>(samples, kHostTokensWithDrafts));
  }
}

TEST(SchedulerTest, AGpuHasRoomForTheDraftsOfMoreSequences) {
  EXPECT_EQ(MaxTokensWithDrafts(/*on_host=*/true, DType::kBFloat16), kHostTokensWithDrafts);
  EXPECT_EQ(MaxTokensWithDrafts(/*on_host=*/false, DType::kBFloat16), 64);
  const auto prompt = MakeDraftedPrompt(1, 8, {.tandem = false});
  SchedulerLimits limits = kWide;
  limits.max_tokens_with_drafts = 48;
  Scheduler scheduler(limits);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  for (const PassEntry& entry : scheduler.Plan(S).entries) EXPECT_EQ(entry.draws, 1 + 5);
}

TEST(SchedulerTest, DraftsStayWithinTheTokenBudget) {
  const auto prompt = MakeDraftedPrompt(1, 2, {.tandem = false});
  Scheduler scheduler({.max_num_seqs = 2, .max_batched_tokens = 3, .num_blocks = {9, 9}});
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  const PassPlan plan = scheduler.Plan(S);
  ASSERT_EQ(plan.entries.size(), 2u);
  EXPECT_EQ(plan.entries[0].draws + plan.entries[1].draws, 3);
}

TEST(SchedulerTest, DraftsTakeIdleBlocksAlone) {
  const auto first = MakeDraftedPrompt(62, 1, {.tandem = false});
  const auto second = MakePrompt(60, 1, {.tandem = false, .token = 2});
  Scheduler scheduler({.max_num_seqs = 8, .max_batched_tokens = 122, .num_blocks = {2, 2}});
  Enqueue(scheduler, *first);
  Enqueue(scheduler, *second);
  scheduler.Admit();
  ASSERT_EQ(RunPass(scheduler, S).entries.size(), 2u);
  // The first has 63 tokens, and room for one draft in its block.
  const PassPlan plan = scheduler.Plan(S);
  ASSERT_EQ(plan.entries.size(), 2u);
  EXPECT_EQ(plan.entries[0].end, 64);
  EXPECT_EQ(plan.entries[0].draws, 2);
  EXPECT_EQ(scheduler.preemptions_total(), 0);
}

TEST(SchedulerTest, BlocksOfRejectedDraftsAreGivenBack) {
  const auto prompt = MakeDraftedPrompt(62, 1, {.tandem = false});
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  RunPass(scheduler, S);
  const PassEntry rejected = scheduler.Plan(S).entries[0];
  EXPECT_EQ(rejected.end, 63 + 15);
  EXPECT_EQ(scheduler.num_held_blocks(S), 2);
  WriteWithDrafts(scheduler, S, rejected, 0);
  EXPECT_EQ(prompt->samples[0]->lane(S).cursor, 63);
  EXPECT_EQ(scheduler.num_held_blocks(S), 1);
  const PassEntry accepted = scheduler.Plan(S).entries[0];
  WriteWithDrafts(scheduler, S, accepted, accepted.draws - 1);
  EXPECT_EQ(prompt->samples[0]->lane(S).cursor, 64 + 15);
  EXPECT_EQ(scheduler.num_held_blocks(S), 2);
}

TEST(SchedulerTest, TheJuniorWritesDraftsBeforeTheSeniorVerifiesThem) {
  const auto prompt = MakeDraftedPrompt(3, 1, {.tandem = false}, /*junior=*/true);
  Sequence& sequence = *prompt->samples[0];
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  std::vector<int64_t> begins;
  for (int i = 0; i < 13; ++i) {  // the prompt takes three tokens of the senior's pass
    scheduler.AskForDrafts();
    EXPECT_THAT(scheduler.Plan(S).entries, IsEmpty());
    ASSERT_EQ(scheduler.LaneOrder()[0], J);
    const PassEntry entry = scheduler.Plan(J).entries[0];
    EXPECT_TRUE(entry.drafting);
    EXPECT_EQ(entry.draws, 1);
    EXPECT_EQ(entry.end, 3 + i);
    begins.push_back(entry.begin);
    scheduler.Advance(J, entry);
    sequence.drafts->tokens.push_back(7);
  }
  EXPECT_THAT(begins, ElementsAre(0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14));
  scheduler.AskForDrafts();
  EXPECT_THAT(scheduler.Plan(J).entries, IsEmpty());
  const PassEntry verification = scheduler.Plan(S).entries[0];
  EXPECT_EQ(verification.end, 3 + 13);
  EXPECT_EQ(verification.draws, 14);
  WriteWithDrafts(scheduler, S, verification, 4);
  EXPECT_EQ(sequence.lane(S).cursor, 7);
  EXPECT_EQ(sequence.lane(J).cursor, 7) << "it has read the accepted drafts";
  EXPECT_THAT(sequence.drafts->tokens, IsEmpty());
  scheduler.AskForDrafts();
  EXPECT_EQ(scheduler.Plan(J).entries[0].begin, 7);
}

TEST(SchedulerTest, TheJuniorWritesNoDraftsForAPassThatReadsALongPrompt) {
  const auto prompt = MakeDraftedPrompt(20, 1, {.tandem = false}, /*junior=*/true);
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  scheduler.AskForDrafts();
  EXPECT_THAT(scheduler.Plan(J).entries, IsEmpty());
  const PassPlan read = RunPass(scheduler, S);
  ASSERT_EQ(read.entries.size(), 1u);
  EXPECT_EQ(read.entries[0].end, 20);
  EXPECT_EQ(read.entries[0].draws, 1);
  scheduler.AskForDrafts();
  EXPECT_EQ(prompt->samples[0]->drafts->wanted, 15);
  EXPECT_TRUE(scheduler.Plan(J).entries.at(0).drafting);
}

TEST(SchedulerTest, TheJuniorWritesNoDraftsForMoreSequencesThanAPassVerifies) {
  for (const int samples : {4, 9}) {
    const auto prompt = MakeDraftedPrompt(1, samples, {.tandem = false}, /*junior=*/true);
    Scheduler scheduler(kWide);
    Enqueue(scheduler, *prompt);
    scheduler.Admit();
    scheduler.AskForDrafts();
    EXPECT_EQ(prompt->samples[0]->drafts->wanted, samples == 4 ? 3 : 0);
    EXPECT_EQ(scheduler.Plan(J).entries.empty(), samples == 9);
    EXPECT_EQ(scheduler.Plan(S).entries.empty(), samples == 4);
  }
}

TEST(SchedulerTest, TheJuniorsDraftsPreemptNobody) {
  const auto drafted = MakeDraftedPrompt(60, 1, {.tandem = false}, /*junior=*/true);
  const auto other = MakePrompt(60, 1, {.token = 2});
  Scheduler scheduler({.max_num_seqs = 8, .max_batched_tokens = 200, .num_blocks = {9, 2}});
  Enqueue(scheduler, *drafted);
  Enqueue(scheduler, *other);
  scheduler.Admit();
  ASSERT_EQ(scheduler.running().size(), 2u);
  RunPass(scheduler, S);
  RunPass(scheduler, S);  // nobody asks for drafts yet
  RunPass(scheduler, J);  // the junior reads what it must write
  Sequence& sequence = *drafted->samples[0];
  // One of its two blocks is left, which holds four drafts behind the sequence's tokens.
  while (!sequence.drafts->closed && sequence.drafts->length.Next() > 0) {
    scheduler.AskForDrafts();
    const PassPlan plan = scheduler.Plan(J);
    for (const PassEntry& entry : plan.entries) {
      if (entry.draws == 0 || !entry.drafting) continue;
      scheduler.Advance(J, entry);
      sequence.drafts->tokens.push_back(7);
    }
    if (!sequence.drafting()) break;
  }
  EXPECT_EQ(sequence.drafts->length.Next(), 0) << "it pauses";
  EXPECT_EQ(scheduler.preemptions_total(), 0);
  const PassPlan plan = scheduler.Plan(S);
  ASSERT_FALSE(plan.entries.empty());
  EXPECT_EQ(plan.entries[0].sequence, &sequence) << "the senior goes on";
}

TEST(SequenceTest, DraftsEndWhereAnotherAuthorMayWrite) {
  const auto prompt = MakeDraftedPrompt(3, 1, {});
  prompt->request.tandem = {.selection_strategy = SelectionStrategy::kSentence};
  const std::vector<int32_t> boundaries = {5}, stops = {9};
  Sequence sequence(prompt.get(), 0, std::make_shared<TokenSet>(boundaries));
  prompt->stop_tokens = TokenSet(stops);
  EXPECT_EQ(sequence.CountUsable(std::vector<int32_t>{1, 2, 3}), 3);
  EXPECT_EQ(sequence.CountUsable(std::vector<int32_t>{1, 5, 3}), 1);
  EXPECT_EQ(sequence.CountUsable(std::vector<int32_t>{1, 2, 9}), 2) << "nothing follows a stop";
  prompt->max_response_tokens = 3;
  EXPECT_EQ(sequence.CountUsable(std::vector<int32_t>{1, 2, 3}), 2);
}

TEST(SequenceTest, APositionWhoseLogProbIsMissingIsConsumedByTheSequenceItself) {
  const auto prompt = MakePrompt(3, 1, {.other_logprobs = true});
  Sequence& sequence = *prompt->samples[0];
  EXPECT_EQ(sequence.FirstWanted(S), 2);
  Write(sequence);
  EXPECT_EQ(sequence.FirstWanted(J), 2);
  sequence.other_logprobs[0] = -1;
  EXPECT_EQ(sequence.FirstWanted(J), 3);
}

TEST(SchedulerTest, PrefixesOfOldWeightsAreNotTakenOver) {
  const auto prompt = MakePrompt(70, 2);
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  RunPass(scheduler, S);
  scheduler.BumpEpoch(S, /*recompute=*/false);
  const PassPlan second = scheduler.Plan(S);
  ASSERT_EQ(second.entries.size(), 1u);
  EXPECT_THAT(second.copies, IsEmpty());
  EXPECT_EQ(second.entries[0].begin, 0);
}

TEST(SchedulerTest, RecomputingStartsRunningSequencesAgain) {
  const auto prompt = MakePrompt(70, 1);
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  RunPass(scheduler, S);
  RunPass(scheduler, J);
  scheduler.BumpEpoch(S, /*recompute=*/true);
  EXPECT_EQ(scheduler.num_held_blocks(S), 0);
  EXPECT_GT(scheduler.num_held_blocks(J), 0);
  EXPECT_EQ(scheduler.Plan(S).entries[0].begin, 0);
}

TEST(SchedulerTest, TheNewestSequenceGivesUpItsBlocks) {
  const auto first = MakePrompt(60, 1, {.tandem = false});
  const auto second = MakePrompt(60, 1, {.tandem = false, .token = 2});
  Scheduler scheduler(
      {.max_num_seqs = 8, .max_batched_tokens = kWide.max_batched_tokens, .num_blocks = {2, 2}});
  Enqueue(scheduler, *first);
  Enqueue(scheduler, *second);
  scheduler.Admit();
  ASSERT_EQ(scheduler.running().size(), 2u);
  while (first->samples[0]->length() < 65) RunPass(scheduler, S);
  EXPECT_EQ(scheduler.preemptions_total(), 0);
  // The next token of the first needs a second block.
  EXPECT_THAT(Sequences(RunPass(scheduler, S)), ElementsAre(first->samples[0].get()));
  EXPECT_EQ(scheduler.preemptions_total(), 1);
  EXPECT_EQ(scheduler.num_waiting(), 1);
  scheduler.Admit();
  EXPECT_EQ(scheduler.running().size(), 1u);
  scheduler.Remove(first->samples[0].get());
  scheduler.Admit();
  const PassPlan again = RunPass(scheduler, S);
  EXPECT_EQ(again.entries[0].begin, 0) << "its block was given out";
  EXPECT_EQ(again.entries[0].end, 65);
  EXPECT_EQ(again.entries[0].draws, 1);
}

// Windows of 100 tokens lie in at most three blocks. A lane without windows keeps all.
TEST(SchedulerTest, BlocksBehindTheWindowsAreGivenBack) {
  SchedulerLimits limits = kWide;
  limits.windows = {100, kNoWindow};
  for (const bool windows : {true, false}) {
    const auto prompt = MakePrompt(300, 1, {.tandem = false});
    Scheduler scheduler(windows ? limits : kWide);
    Enqueue(scheduler, *prompt);
    scheduler.Admit();
    Sequence& sequence = *prompt->samples[0];
    for (int i = 0; i < 400; ++i) {
      ASSERT_EQ(RunPass(scheduler, S).entries.size(), 1u);
      const int64_t cursor = sequence.lane(S).cursor;
      const int64_t unread = windows ? (cursor - 99) / 64 : 0;
      ASSERT_EQ(scheduler.num_held_blocks(S), KvBlocks(cursor) - unread) << cursor;
      if (windows) {
        ASSERT_LE(scheduler.num_held_blocks(S), WindowBlocks(100));
      }
    }
    scheduler.Remove(&sequence);
    EXPECT_EQ(scheduler.num_held_blocks(S), 0);
  }
}

// Each sequence has 700 tokens in the end, eleven blocks, of a cache of eight.
TEST(SchedulerTest, SequencesWithWindowsAreLongerThanTheirBlocks) {
  const auto first = MakePrompt(150, 1, {.tandem = false});
  const auto second = MakePrompt(150, 1, {.tandem = false, .token = 2});
  Scheduler scheduler(
      {.max_num_seqs = 8, .max_batched_tokens = 150, .num_blocks = {8, 8}, .windows = {100, 100}});
  Enqueue(scheduler, *first);
  Enqueue(scheduler, *second);
  scheduler.Admit();
  EXPECT_EQ(scheduler.running().size(), 2u);
  while (first->samples[0]->length() < 700 || second->samples[0]->length() < 700) {
    ASSERT_FALSE(RunPass(scheduler, S).entries.empty());
  }
  EXPECT_EQ(scheduler.preemptions_total(), 0);
}

// The last prompt tokens are copied from a sample that still has them, or read again.
TEST(SchedulerTest, ABlockThatASampleGaveBackIsNotCopied) {
  for (const int64_t window : {int64_t{10}, kNoWindow}) {
    const auto prompt = MakePrompt(100, 2, {.tandem = false});
    SchedulerLimits limits = kWide;
    limits.windows = {window, kNoWindow};
    Scheduler scheduler(limits);
    scheduler.Enqueue(prompt->samples[0].get());
    scheduler.Admit();
    for (int i = 0; i < 60; ++i) RunPass(scheduler, S);  // past both blocks of the prompt
    Sequence* const later = prompt->samples[1].get();
    scheduler.Enqueue(later);
    scheduler.Admit();
    const PassPlan plan = RunPass(scheduler, S);
    ASSERT_EQ(plan.entries.size(), 2u);
    for (const PassEntry& entry : plan.entries) {
      if (entry.sequence == later) {
        EXPECT_EQ(entry.begin, window == 10 ? 64 : 99);
      }
    }
    EXPECT_EQ(plan.copies.size(), window == 10 ? 0u : 1u);
  }
}

TEST(SchedulerTest, RunningSequencesAreInTheOrderOfTheirPriorities) {
  const auto low = MakePrompt(10, 2, {.tandem = false, .priority = -1});
  const auto middle = MakePrompt(10, 1, {.tandem = false, .token = 2});
  const auto high = MakePrompt(10, 1, {.tandem = false, .token = 3, .priority = 1});
  Scheduler scheduler({.max_num_seqs = 8, .max_batched_tokens = 12, .num_blocks = {8, 8}});
  for (const Prompt* prompt : {low.get(), high.get(), middle.get()}) {
    Enqueue(scheduler, *prompt);
    scheduler.Admit();
  }
  EXPECT_THAT(scheduler.running(), ElementsAre(high->samples[0].get(), middle->samples[0].get(),
                                               low->samples[0].get(), low->samples[1].get()));
  // The token budget is spent in this order.
  EXPECT_THAT(Sequences(RunPass(scheduler, S)),
              ElementsAre(high->samples[0].get(), middle->samples[0].get()));
}

TEST(SchedulerTest, TheLowestPriorityGivesUpItsBlocks) {
  const auto low = MakePrompt(60, 1, {.tandem = false, .priority = -1});
  const auto high = MakePrompt(60, 1, {.tandem = false, .token = 2});
  Scheduler scheduler(
      {.max_num_seqs = 8, .max_batched_tokens = kWide.max_batched_tokens, .num_blocks = {2, 2}});
  Enqueue(scheduler, *low);
  scheduler.Admit();
  RunPass(scheduler, S);
  Enqueue(scheduler, *high);
  scheduler.Admit();
  ASSERT_EQ(scheduler.running().size(), 2u);
  RunPass(scheduler, S);  // the newer one reads its prompt
  // The older one comes to need a second block first, and must wait for it.
  while (high->samples[0]->length() < 65) {
    EXPECT_EQ(RunPass(scheduler, S).entries[0].sequence, high->samples[0].get());
  }
  EXPECT_EQ(low->samples[0]->length(), 65);
  EXPECT_EQ(scheduler.preemptions_total(), 0);
  EXPECT_THAT(Sequences(RunPass(scheduler, S)), ElementsAre(high->samples[0].get()));
  EXPECT_EQ(scheduler.preemptions_total(), 1);
  EXPECT_THAT(scheduler.running(), ElementsAre(high->samples[0].get()));
}

TEST(SchedulerTest, APreemptedSequenceWaitsUntilThereAreBlocksForAllItsTokens) {
  const auto first = MakePrompt(300, 1, {.tandem = false});
  const auto second = MakePrompt(300, 1, {.tandem = false, .token = 2});
  Scheduler scheduler(
      {.max_num_seqs = 8, .max_batched_tokens = kWide.max_batched_tokens, .num_blocks = {12, 12}});
  Enqueue(scheduler, *first);
  Enqueue(scheduler, *second);
  scheduler.Admit();
  ASSERT_EQ(scheduler.running().size(), 2u);
  // Each comes to need seven blocks.
  while (first->samples[0]->length() < 440) {
    scheduler.Admit();
    RunPass(scheduler, S);
  }
  EXPECT_EQ(scheduler.preemptions_total(), 1);
  EXPECT_EQ(scheduler.running().size(), 1u);
}

// A scheduler with solo prompts of the given lengths, and passes over them that run; the first is
// planned.
struct RunningPass {
  RunningPass(const std::vector<int>& lengths, std::array<int64_t, 2> num_blocks)
      : scheduler({.max_num_seqs = 8,
                   .max_batched_tokens = kWide.max_batched_tokens,
                   .num_blocks = num_blocks}) {
    for (const int length : lengths) {
      prompts.push_back(
          MakePrompt(length, 1, {.tandem = false, .token = 1 + static_cast<int>(prompts.size())}));
      prompts.back()->max_response_tokens = 10;
      Enqueue(scheduler, *prompts.back());
    }
    scheduler.Admit();
    Start(scheduler.Plan(S));
  }
  void Start(const PassPlan& plan) {
    for (const PassEntry& entry : plan.entries) ++entry.sequence->running_passes;
    plans.push_back(plan);
  }
  // Ends the oldest pass.
  void End() {
    for (const PassEntry& entry : plans.front().entries) {
      --entry.sequence->running_passes;
      Write(*entry.sequence);
      scheduler.Advance(S, entry);
    }
    plans.erase(plans.begin());
  }
  Sequence& sequence(size_t i) { return *prompts[i]->samples[0]; }

  Scheduler scheduler;
  std::vector<std::unique_ptr<Prompt>> prompts;
  std::vector<PassPlan> plans;
};

TEST(SchedulerTest, TheNextPassIsPlannedAhead) {
  RunningPass pass({5, 7, 6}, kWide.num_blocks);
  pass.prompts[1]->max_response_tokens = 1;
  const PassPlan* const ahead = pass.scheduler.PlanAhead(S);
  ASSERT_NE(ahead, nullptr);
  ASSERT_EQ(ahead->entries.size(), 2u) << "one response ends with its next token";
  for (const size_t i : {0, 1}) {
    const PassEntry& entry = ahead->entries[i];
    EXPECT_EQ(entry.sequence, &pass.sequence(2 * i));
    EXPECT_EQ(entry.follows, 2 * i);
    EXPECT_EQ(entry.begin, entry.sequence->length());
    EXPECT_EQ(entry.end, entry.begin + 1);
    EXPECT_EQ(entry.draws, 1);
  }
}

TEST(SchedulerTest, NoPassIsPlannedAheadThatLeavesASequenceBehind) {
  RunningPass pass({5, 7}, kWide.num_blocks);
  EXPECT_EQ(pass.scheduler.PlanAhead(J), nullptr);
  pass.prompts[1]->request.num_top_logprobs = 2;
  EXPECT_EQ(pass.scheduler.PlanAhead(S), nullptr) << "the host draws";
  pass.prompts[1]->request.num_top_logprobs = 0;
  pass.prompts[1]->request.return_routed_experts = true;
  EXPECT_EQ(pass.scheduler.PlanAhead(S), nullptr) << "a record may be read";
  pass.prompts[1]->request.return_routed_experts = false;
  const auto late = MakePrompt(3, 1, {.tandem = false});
  Enqueue(pass.scheduler, *late);
  pass.scheduler.Admit();
  EXPECT_EQ(pass.scheduler.PlanAhead(S), nullptr) << "a prompt waits";
  pass.scheduler.Remove(late->samples[0].get());
  EXPECT_NE(pass.scheduler.PlanAhead(S), nullptr);
}

TEST(SchedulerTest, NoPassIsPlannedAheadWhereNoTokenFollows) {
  RunningPass pass({5, 7}, kWide.num_blocks);
  for (const auto& prompt : pass.prompts) prompt->max_response_tokens = 1;
  EXPECT_EQ(pass.scheduler.PlanAhead(S), nullptr);
}

TEST(SchedulerTest, APassThatIsPlannedAheadPreemptsNobodyAndKeepsItsBlocks) {
  for (const int64_t blocks : {2, 3}) {
    RunningPass pass({63, 5}, {blocks, 1});
    pass.End();
    pass.Start(pass.scheduler.Plan(S));
    const PassPlan* const ahead = pass.scheduler.PlanAhead(S);
    EXPECT_EQ(ahead != nullptr, blocks == 3);
    EXPECT_EQ(pass.scheduler.preemptions_total(), 0);
    if (ahead == nullptr) continue;
    pass.End();
    EXPECT_EQ(pass.sequence(0).lane(S).table.size(), 1) << "as of a plan that nobody started";
    pass.Start(pass.scheduler.Plan(S));
    const PassPlan* const next = pass.scheduler.PlanAhead(S);
    ASSERT_NE(next, nullptr);
    pass.Start(*next);
    pass.End();
    EXPECT_EQ(pass.sequence(0).lane(S).table.size(), 2);
    EXPECT_EQ(pass.scheduler.num_held_blocks(S), 3);
  }
}

TEST(SchedulerTest, AnEndedSequenceDrainsTheLaggingLane) {
  const auto prompt = MakePrompt(3, 1, {.other_logprobs = true});
  Sequence& sequence = *prompt->samples[0];
  Scheduler scheduler(kWide);
  Enqueue(scheduler, *prompt);
  scheduler.Admit();
  RunPass(scheduler, S);
  sequence.finish_reason = FinishReason::kLength;
  EXPECT_FALSE(sequence.complete());
  EXPECT_THAT(scheduler.Plan(S).entries, IsEmpty());
  const auto drain = RunPass(scheduler, J).entries;
  ASSERT_EQ(drain.size(), 1u);
  EXPECT_EQ(drain[0].end, 3);  // the last token predicts nothing
  EXPECT_EQ(drain[0].draws, 0);
  EXPECT_TRUE(sequence.complete());
}

}  // namespace
}  // namespace tandem::rollout
