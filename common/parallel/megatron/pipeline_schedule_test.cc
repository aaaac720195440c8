#include "common/parallel/megatron/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace tandem::parallel {
namespace {

TEST(PipelineBlocksTest, EveryBlockIsInOneVirtualStageAndLayersAreEven) {
  for (int64_t stages = 1; stages <= 4; ++stages) {
    for (int64_t virtual_stages = 1; virtual_stages <= 3; ++virtual_stages) {
      for (int64_t layers = stages * virtual_stages; layers <= 3 * stages * virtual_stages;
           ++layers) {
        int64_t next = 0;
        for (int64_t position = 0; position < stages * virtual_stages; ++position) {
          const BlockRange blocks = BlocksOfVirtualStage(layers, 1, {stages, virtual_stages},
                                                         position % stages, position / stages);
          EXPECT_EQ(blocks.begin, next);
          next = blocks.end;
          const bool is_first = position == 0, is_last = position + 1 == stages * virtual_stages;
          const int64_t own = blocks.end - blocks.begin - (is_first ? 1 : 0) - (is_last ? 1 : 0);
          EXPECT_GE(own, layers / (stages * virtual_stages));
          EXPECT_LE(own, (layers + stages * virtual_stages - 1) / (stages * virtual_stages));
        }
        EXPECT_EQ(next, layers + 2);
      }
    }
  }
}

TEST(PipelineBlocksTest, TheFirstVirtualStagesHaveTheLayersThatAreLeft) {
  const BlockRange first = BlocksOfVirtualStage(5, 1, {2, 1}, 0, 0),
                   last = BlocksOfVirtualStage(5, 1, {2, 1}, 1, 0);
  EXPECT_EQ(first.begin, 0);
  EXPECT_EQ(first.end, 4);
  EXPECT_EQ(last.begin, 4);
  EXPECT_EQ(last.end, 7);
}

struct Timeline {
  bool finished = false;
  int64_t time = 0;  // in actions, each of which takes 1
  // By stage, the maximum number of passes that have run forward and not yet back.
  std::vector<int64_t> max_open;
};

// Runs the lists as the stages do: an action starts when the stage's previous one has ended, its
// input has been sent, and the stage has fewer than kSendsInFlight sends under way.
Timeline Simulate(const PipelineShape& shape, int64_t count) {
  const int64_t last_position = shape.stages * shape.virtual_stages - 1;
  std::vector<std::vector<PipelineAction>> lists;
  for (int64_t s = 0; s < shape.stages; ++s) lists.push_back(PipelineSchedule(shape, count, s));
  std::map<std::tuple<bool, int64_t, int64_t>, int64_t> ends;  // forward, position, micro-batch
  std::vector<size_t> next(lists.size());
  std::vector<int64_t> free_at(lists.size()), open(lists.size());
  // Sends that have not been received, by direction and sending stage.
  std::map<std::pair<bool, size_t>, int64_t> on_the_way;
  const auto sender = [&](bool is_forward, size_t receiver) {
    return std::pair(is_forward, (receiver + (is_forward ? lists.size() - 1 : 1)) % lists.size());
  };
  Timeline timeline;
  timeline.max_open.resize(lists.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < lists.size(); ++s) {
      if (next[s] == lists[s].size()) continue;
      const PipelineAction action = lists[s][next[s]];
      const int64_t position = action.virtual_stage * shape.stages + static_cast<int64_t>(s);
      int64_t start = free_at[s];
      const auto needs = [&](bool is_forward, int64_t of_position) {
        const auto found = ends.find({is_forward, of_position, action.micro_batch});
        if (found == ends.end()) return false;
        start = std::max(start, found->second);
        return true;
      };
      const bool ready = action.is_forward ? position == 0 || needs(true, position - 1)
                                           : needs(true, position) && (position == last_position ||
                                                                       needs(false, position + 1));
      const bool receives = action.is_forward ? position > 0 : position < last_position;
      const bool sends = action.is_forward ? position < last_position : position > 0;
      int64_t& own = on_the_way[{action.is_forward, s}];
      if (!ready || (sends && own >= kSendsInFlight)) continue;
      if (sends) ++own;
      if (receives) --on_the_way[sender(action.is_forward, s)];
      free_at[s] = start + 1;
      ends[{action.is_forward, position, action.micro_batch}] = start + 1;
      open[s] += action.is_forward ? 1 : -1;
      timeline.max_open[s] = std::max(timeline.max_open[s], open[s]);
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
    for (int64_t virtual_stages = 1; virtual_stages <= (stages == 1 ? 1 : 4); ++virtual_stages) {
      for (int64_t count = 0; count <= 3 * stages + 1; ++count) {
        SCOPED_TRACE(testing::Message() << stages << " stages, " << virtual_stages
                                        << " virtual stages, " << count << " batches");
        check(PipelineShape{stages, virtual_stages}, count);
      }
    }
  }
}

TEST(PipelineScheduleTest, AnyNumberOfMicroBatchesComesToTheEnd) {
  ForShapes([](const PipelineShape& shape, int64_t count) {
    for (int64_t stage = 0; stage < shape.stages; ++stage) {
      const auto actions = PipelineSchedule(shape, count, stage);
      EXPECT_EQ(static_cast<int64_t>(actions.size()), 2 * shape.virtual_stages * count);
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

// The activations that wait for their backward pass are p - s micro-batches in 1F1B; in the
// interleaved schedule its warm-up and one more.
TEST(PipelineScheduleTest, ActivationsAreBounded) {
  ForShapes([](const PipelineShape& shape, int64_t count) {
    const Timeline timeline = Simulate(shape, count);
    for (int64_t s = 0; s < shape.stages; ++s) {
      const int64_t after = shape.stages - 1 - s;
      const int64_t bound = shape.virtual_stages == 1
                                ? after + 1
                                : 2 * after + (shape.virtual_stages - 1) * shape.stages + 1;
      EXPECT_LE(timeline.max_open[static_cast<size_t>(s)],
                std::min(bound, count * shape.virtual_stages));
    }
  });
}

// Idle time over the time of the work: (p - 1) / m, and (p - 1) / (m v) with v virtual stages.
TEST(PipelineScheduleTest, TheBubbleIsThatOfThePaper) {
  for (int64_t stages = 2; stages <= 5; ++stages) {
    for (int64_t virtual_stages = 1; virtual_stages <= 4; ++virtual_stages) {
      for (int64_t count = stages; count <= 4 * stages; count += stages) {
        const int64_t work = 2 * count * virtual_stages;
        EXPECT_EQ(Simulate({stages, virtual_stages}, count).time - work, 2 * (stages - 1))
            << stages << " stages, " << virtual_stages << " virtual stages, " << count
            << " micro-batches";
      }
    }
  }
}

}  // namespace
}  // namespace tandem::parallel
