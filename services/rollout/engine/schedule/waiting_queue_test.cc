#include "services/rollout/engine/schedule/waiting_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace tandem::rollout {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class WaitingQueueTest : public ::testing::Test {
 protected:
  // Adds the samples of a new prompt.
  Prompt* Add(uint64_t stream, int32_t priority = 0, int samples = 1) {
    auto prompt = std::make_unique<Prompt>();
    prompt->id = prompts_.size();
    prompt->stream = stream;
    prompt->request.prompt_token_ids = {1};
    prompt->request.priority = priority;
    for (int i = 0; i < samples; ++i) {
      prompt->samples.push_back(
          std::make_unique<Sequence>(prompt.get(), i, std::make_shared<TokenSet>()));
      queue_.Add(prompt->samples.back().get());
    }
    prompts_.push_back(std::move(prompt));
    return prompts_.back().get();
  }
  // Takes `count` sequences; returns the streams that they belong to.
  std::vector<uint64_t> TakeStreams(int count) {
    std::vector<uint64_t> streams;
    for (int i = 0; i < count; ++i) streams.push_back(queue_.Take()->prompt->stream);
    return streams;
  }

  static constexpr int64_t kTogether = 4;
  WaitingQueue queue_{kTogether};
  std::vector<std::unique_ptr<Prompt>> prompts_;
};

TEST_F(WaitingQueueTest, AStreamIsServedInTheOrderOfArrival) {
  EXPECT_EQ(queue_.Next(), nullptr);
  for (int i = 0; i < 30; ++i) Add(1);
  for (int i = 0; i < 30; ++i) {
    ASSERT_EQ(queue_.size(), 30 - i);
    ASSERT_EQ(queue_.Take(), prompts_[i]->samples[0].get());
  }
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitingQueueTest, HigherPrioritiesComeFirst) {
  Add(1, 0);
  Add(2, -5);
  Add(3, 7);
  Add(4, std::numeric_limits<int32_t>::min());
  Add(5, std::numeric_limits<int32_t>::max());
  EXPECT_THAT(TakeStreams(5), ElementsAre(5, 3, 1, 2, 4));
}

TEST_F(WaitingQueueTest, TheStreamWithFewerRunningSequencesComesFirst) {
  for (int i = 0; i < 4000; ++i) Add(1);
  TakeStreams(16);
  for (int i = 0; i < 4; ++i) Add(2);
  EXPECT_THAT(TakeStreams(4), Each(2));
  EXPECT_THAT(TakeStreams(2), Each(1));
}

TEST_F(WaitingQueueTest, StreamsTakeTurns) {
  for (const uint64_t stream : {1, 1, 1, 2, 2, 2, 3, 3}) Add(stream);
  EXPECT_THAT(TakeStreams(8), ElementsAre(1, 2, 3, 1, 2, 3, 1, 2));
}

TEST_F(WaitingQueueTest, AStreamWhoseSequencesEndedHasItsTurnAgain) {
  for (const uint64_t stream : {1, 1, 1, 2, 2}) Add(stream);
  EXPECT_THAT(TakeStreams(3), ElementsAre(1, 2, 1));
  queue_.End(*prompts_[0]->samples[0]);
  queue_.End(*prompts_[1]->samples[0]);
  EXPECT_THAT(TakeStreams(2), ElementsAre(1, 2));
}

TEST_F(WaitingQueueTest, SamplesOfAPromptComeTogetherButNotTooMany) {
  Add(1, 0, 3);
  Add(2, 0, 6);
  Add(1);
  EXPECT_THAT(TakeStreams(10), ElementsAre(1, 1, 1, 2, 2, 2, 2, 1, 2, 2));
}

TEST_F(WaitingQueueTest, APreemptedSequenceComesBeforeOtherPrompts) {
  for (const uint64_t stream : {1, 1, 2, 2}) Add(stream);
  Sequence* const first = queue_.Take();
  queue_.Take();
  queue_.Take();
  queue_.Return(first);
  EXPECT_EQ(queue_.size(), 2);
  EXPECT_EQ(queue_.Take(), first);
  EXPECT_THAT(TakeStreams(1), ElementsAre(2));
}

TEST_F(WaitingQueueTest, LowPriorityDoesNotStarve) {
  Sequence* const low = Add(1, -1)->samples[0].get();
  int before = 0;
  do {
    Add(2, 1);
    ++before;
  } while (queue_.Take() != low);
  EXPECT_EQ(before - 1, WaitingQueue::kMaxPassedOver);
  EXPECT_TRUE(low->overdue);
  // It comes before all priorities when it is preempted, too.
  queue_.Return(low);
  EXPECT_EQ(queue_.Take(), low);
}

TEST_F(WaitingQueueTest, ACancelledSequenceIsGone) {
  for (const uint64_t stream : {1, 2, 1}) Add(stream);
  queue_.Remove(prompts_[1]->samples[0].get());
  EXPECT_THAT(TakeStreams(2), ElementsAre(1, 1));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitingQueueTest, AnEmptyQueueRemembersNothing) {
  Sequence* const first = Add(1, -1)->samples[0].get();
  for (int i = 0; i < WaitingQueue::kMaxPassedOver; ++i) Add(2);
  TakeStreams(WaitingQueue::kMaxPassedOver);
  queue_.Remove(first);
  Add(3, -1);
  Add(2);
  EXPECT_THAT(TakeStreams(2), ElementsAre(2, 3));
}

// Random arrivals, ends, preemptions and cancellations: every sequence is taken, and overtaken by
// no more younger ones than the header says.
TEST_F(WaitingQueueTest, NothingStarvesInRandomWorkloads) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
    struct Wait {
      int64_t younger = 0;
      int64_t older = 0;
    };
    std::map<Sequence*, Wait> waits;
    std::vector<Sequence*> running;
    const auto take_away = [&](size_t i) {
      Sequence* const sequence = running[i];
      running.erase(running.begin() + static_cast<int64_t>(i));
      return sequence;
    };
    constexpr int64_t kArrivals = 500;
    const int64_t max_running = 1 + below(8);
    for (int64_t event = 0; event < kArrivals || !queue_.empty(); ++event) {
      ASSERT_LT(event, 100'000);
      const bool arrives = event < kArrivals;
      if (arrives && below(3) == 0) {
        // High priorities are the most frequent, so that low ones would starve.
        const Prompt* prompt = Add(below(6), static_cast<int32_t>(std::max(below(5), below(5))),
                                   static_cast<int>(1 + below(6)));
        for (const auto& sample : prompt->samples) waits[sample.get()] = {};
      }
      if (!running.empty() && below(2) == 0) queue_.End(*take_away(below(std::ssize(running))));
      if (!running.empty() && below(6) == 0) {
        Sequence* const preempted = take_away(below(std::ssize(running)));
        queue_.Return(preempted);
        waits[preempted] = {};
      }
      if (!waits.empty() && arrives && below(20) == 0) {
        const auto cancelled = std::next(waits.begin(), below(std::ssize(waits)));
        queue_.Remove(cancelled->first);
        waits.erase(cancelled);
      }
      if (queue_.empty() || std::ssize(running) >= max_running) continue;
      Sequence* const expected = queue_.Next();
      const bool was_overdue = expected->overdue;
      Sequence* const taken = queue_.Take();
      ASSERT_EQ(taken, expected);
      ASSERT_EQ(waits.erase(taken), 1u);
      running.push_back(taken);
      if (was_overdue) continue;
      for (auto& [sequence, wait] : waits) {
        ++(taken->arrival < sequence->arrival ? wait.older : wait.younger);
        ASSERT_LE(wait.younger, WaitingQueue::kMaxPassedOver * (wait.older + 1));
      }
    }
    EXPECT_TRUE(waits.empty());
    for (const Sequence* sequence : running) queue_.End(*sequence);
    prompts_.clear();
  }
}

// While all streams have waiting sequences of one priority, their numbers of running ones differ by
// no more than what rule 4 and whole prompts add.
TEST_F(WaitingQueueTest, BackloggedStreamsHaveEqualShares) {
  std::map<uint64_t, int64_t> shares;
  for (int i = 0; i < 300; ++i) Add(1);
  for (int i = 0; i < 100; ++i) Add(2);
  for (int i = 0; i < 100; ++i) Add(3);
  std::vector<Sequence*> running;
  std::mt19937 random(1);
  for (int i = 0; i < 240; ++i) {
    if (running.size() == 12) {
      const size_t ended = random() % running.size();
      queue_.End(*running[ended]);
      running.erase(running.begin() + static_cast<int64_t>(ended));
    }
    running.push_back(queue_.Take());
    ++shares[running.back()->prompt->stream];
  }
  for (const auto& [stream, taken] : shares) EXPECT_NEAR(taken, 80, 8) << stream;
}

}  // namespace
}  // namespace tandem::rollout
