#include "common/parallel/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace tandem::parallel {
namespace {

TEST(PipelineBlocksTest, EveryBlockIsInOneChunkAndLayersAreEven) {
  for (int64_t stages = 1; stages <= 4; ++stages) {
    for (int64_t chunks = 1; chunks <= 3; ++chunks) {
      for (int64_t layers = stages * chunks; layers <= 3 * stages * chunks; ++layers) {
        int64_t next = 0;
        for (int64_t part = 0; part < stages * chunks; ++part) {
          const BlockRange blocks =
              BlocksOfChunk(layers, {stages, chunks}, part % stages, part / stages);
          EXPECT_EQ(blocks.begin, next);
          next = blocks.end;
          const bool is_first = part == 0, is_last = part + 1 == stages * chunks;
          const int64_t own = blocks.end - blocks.begin - (is_first ? 1 : 0) - (is_last ? 1 : 0);
          EXPECT_GE(own, layers / (stages * chunks));
          EXPECT_LE(own, (layers + stages * chunks - 1) / (stages * chunks));
        }
        EXPECT_EQ(next, layers + 2);
      }
    }
  }
}

TEST(PipelineBlocksTest, TheFirstPartsHaveTheLayersThatAreLeft) {
  const BlockRange first = BlocksOfChunk(5, {2, 1}, 0, 0), last = BlocksOfChunk(5, {2, 1}, 1, 0);
  EXPECT_EQ(first.begin, 0);
  EXPECT_EQ(first.end, 4);
  EXPECT_EQ(last.begin, 4);
  EXPECT_EQ(last.end, 7);
}

struct Timeline {
  bool finished = false;
  int64_t time = 0;                   // in actions, each of which takes 1
  std::vector<int64_t> most_forward;  // by stage: chunks that ran forward and not back, at most
};

// Runs the lists as the stages would: an action starts when the one before it has ended, what it
// needs has been sent, and of what the stage itself has sent little enough is still on its way.
Timeline Simulate(const PipelineShape& shape, int64_t count) {
  const int64_t last_part = shape.stages * shape.chunks - 1;
  std::vector<std::vector<PipelineAction>> lists;
  for (int64_t s = 0; s < shape.stages; ++s) lists.push_back(PipelineSchedule(shape, count, s));
  std::map<std::tuple<bool, int64_t, int64_t>, int64_t> ends;  // forward, part, micro-batch
  std::vector<size_t> next(lists.size());
  std::vector<int64_t> free_at(lists.size()), open(lists.size());
  // By the stage that sends, forward or back: what has been sent and not been received.
  std::map<std::pair<bool, size_t>, int64_t> on_the_way;
  const auto sender = [&](bool is_forward, size_t receiver) {
    return std::pair(is_forward, (receiver + (is_forward ? lists.size() - 1 : 1)) % lists.size());
  };
  Timeline timeline;
  timeline.most_forward.resize(lists.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < lists.size(); ++s) {
      if (next[s] == lists[s].size()) continue;
      const PipelineAction action = lists[s][next[s]];
      const int64_t part = action.chunk * shape.stages + static_cast<int64_t>(s);
      int64_t start = free_at[s];
      const auto needs = [&](bool is_forward, int64_t of_part) {
        const auto found = ends.find({is_forward, of_part, action.micro_batch});
        if (found == ends.end()) return false;
        start = std::max(start, found->second);
        return true;
      };
      const bool ready = action.is_forward
                             ? part == 0 || needs(true, part - 1)
                             : needs(true, part) && (part == last_part || needs(false, part + 1));
      const bool receives = action.is_forward ? part > 0 : part < last_part;
      const bool sends = action.is_forward ? part < last_part : part > 0;
      int64_t& own = on_the_way[{action.is_forward, s}];
      if (!ready || (sends && own >= kSendsInFlight)) continue;
      if (sends) ++own;
      if (receives) --on_the_way[sender(action.is_forward, s)];
      free_at[s] = start + 1;
      ends[{action.is_forward, part, action.micro_batch}] = start + 1;
      open[s] += action.is_forward ? 1 : -1;
      timeline.most_forward[s] = std::max(timeline.most_forward[s], open[s]);
      timeline.time = std::max(timeline.time, start + 1);
      ++next[s];
      moved = true;
    }
  }
  timeline.finished = true;
  for (size_t s = 0; s < lists.size(); ++s) {
    timeline.finished = timeline.finished && next[s] == lists[s].size() && open[s] == 0;
  }
  return timeline;
}

template <typename Check>
void ForShapes(const Check& check) {
  for (int64_t stages = 1; stages <= 5; ++stages) {
    for (int64_t chunks = 1; chunks <= (stages == 1 ? 1 : 4); ++chunks) {
      for (int64_t count = 0; count <= 3 * stages + 1; ++count) {
        SCOPED_TRACE(testing::Message()
                     << stages << " stages, " << chunks << " chunks, " << count << " batches");
        check(PipelineShape{stages, chunks}, count);
      }
    }
  }
}

TEST(PipelineScheduleTest, AnyNumberOfMicroBatchesComesToTheEnd) {
  ForShapes([](const PipelineShape& shape, int64_t count) {
    for (int64_t stage = 0; stage < shape.stages; ++stage) {
      const auto actions = PipelineSchedule(shape, count, stage);
      EXPECT_EQ(static_cast<int64_t>(actions.size()), 2 * shape.chunks * count);
    }
    EXPECT_TRUE(Simulate(shape, count).finished);
  });
}

TEST(PipelineScheduleTest, OneDirectionHasOneOrderOnAllStages) {
  ForShapes([](const PipelineShape& shape, int64_t count) {
    for (const bool is_forward : {true, false}) {
      const auto of_direction = [&](int64_t stage) {
        auto actions = PipelineSchedule(shape, count, stage);
        std::erase_if(actions, [&](const PipelineAction& a) { return a.is_forward != is_forward; });
        return actions;
      };
      for (int64_t stage = 1; stage < shape.stages; ++stage) {
        EXPECT_EQ(of_direction(stage), of_direction(0));
      }
    }
  });
}

// Activations that wait for their backward pass: p - s micro-batches in 1F1B, and the warm-up of
// the interleaved schedule and the one that runs.
TEST(PipelineScheduleTest, ActivationsAreBounded) {
  ForShapes([](const PipelineShape& shape, int64_t count) {
    const Timeline timeline = Simulate(shape, count);
    for (int64_t s = 0; s < shape.stages; ++s) {
      const int64_t after = shape.stages - 1 - s;
      const int64_t bound =
          shape.chunks == 1 ? after + 1 : 2 * after + (shape.chunks - 1) * shape.stages + 1;
      EXPECT_LE(timeline.most_forward[static_cast<size_t>(s)],
                std::min(bound, count * shape.chunks));
    }
  });
}

// Idle time over the time of the work: (p - 1) / m, and (p - 1) / (m v) with v chunks.
TEST(PipelineScheduleTest, TheBubbleIsThatOfThePaper) {
  for (int64_t stages = 2; stages <= 5; ++stages) {
    for (int64_t chunks = 1; chunks <= 4; ++chunks) {
      for (int64_t count = stages; count <= 4 * stages; count += stages) {
        const int64_t work = 2 * count * chunks;
        EXPECT_EQ(Simulate({stages, chunks}, count).time - work, 2 * (stages - 1))
            << stages << " stages, " << chunks << " chunks, " << count << " micro-batches";
      }
    }
  }
}

}  // namespace
}  // namespace tandem::parallel
