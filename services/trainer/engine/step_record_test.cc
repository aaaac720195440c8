#include "services/trainer/engine/step_record.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "services/trainer/engine/test_batches.h"

namespace tandem::trainer {
namespace {

TEST(StepRecordTest, DigestDependsOnTheContentAlone) {
  EXPECT_EQ(PayloadDigest(TestRequest()), PayloadDigest(TestRequest()));
  std::set<std::string> digests = {PayloadDigest(TestRequest())};
  const auto add = [&](auto change) {
    PolicyBatch batch = TestBatch();
    change(batch);
    EXPECT_TRUE(digests.insert(PayloadDigest(TestRequest(std::move(batch)))).second);
  };
  add([](PolicyBatch& b) { b.samples[0].reward = 0.5; });
  add([](PolicyBatch& b) { b.samples[1].trajectory.authorship_mask[0] ^= 1; });
  add([](PolicyBatch& b) { b.samples[1].trajectory.seed = 1; });
  add([](PolicyBatch& b) { b.objective.gae_lambda = 0.5; });
  add([](PolicyBatch& b) { std::swap(b.samples[0], b.samples[1]); });
}

TEST(StepRecordTest, ReportRoundTripIsExact) {
  StepReport report;
  report.run_id = "run \"x\"";
  report.step = 3;
  report.weights = {.version = 4, .digest = "d"};
  report.skipped = true;
  report.skip_reason = "why";
  report.metrics = {{"loss/total", 0.1 + 0.2}, {"a", -1e-300}, {"b", 3}};
  const StepReport copy = DecodeReport(EncodeReport(report)).value();
  EXPECT_EQ(copy.run_id, report.run_id);
  EXPECT_EQ(copy.step, 3);
  EXPECT_EQ(copy.weights, (WeightsVersion{4, "d"}));
  EXPECT_TRUE(copy.skipped);
  EXPECT_EQ(copy.skip_reason, "why");
  EXPECT_EQ(copy.metrics, report.metrics);
  EXPECT_EQ(DecodeReport("{}").status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace tandem::trainer
