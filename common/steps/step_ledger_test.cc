#include "common/steps/step_ledger.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "common/base/errors/error.h"

namespace tandem::training {
namespace {

StepReport Report(int64_t step) {
  return {.run_id = "run \"x\"", .step = step, .weights = {.version = step, .digest = ""}};
}

TEST(StepLedgerTest, RepeatGetsTheStoredReport) {
  StepLedger ledger;
  EXPECT_EQ(ledger.Find("run \"x\"", "a", "d1").value(), std::nullopt);
  ledger.Record("a", "d1", Report(1));
  EXPECT_EQ(ledger.Find("run \"x\"", "a", "d1").value(), Report(1));
  EXPECT_EQ(ledger.Find("other", "a", "d1").value(), std::nullopt);
  EXPECT_TRUE(ledger.Contains("run \"x\"", "a"));
  EXPECT_FALSE(ledger.Contains("run \"x\"", "b"));
  ledger.RemoveNewest();
  EXPECT_FALSE(ledger.Contains("run \"x\"", "a"));
}

TEST(StepLedgerTest, RequestIdWithAnotherPayloadIsRefused) {
  StepLedger ledger;
  ledger.Record("a", "d1", Report(1));
  const absl::Status status = ledger.Find("run \"x\"", "a", "d2").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Reason(status), "REQUEST_ID_REUSED");
}

TEST(StepLedgerTest, SurvivesSerialisationExactlyAndIsBounded) {
  StepLedger ledger(2);
  ledger.Record("a", "d", Report(1));
  StepReport& full = ledger.Record("b", "d", Report(2));
  full.skipped = true;
  full.skip_reason = "why\n";
  full.metrics = {{"loss/total", 0.1 + 0.2}, {"a", -1e-300}, {"b", 3}};
  const StepReport expected = full;
  ledger.Record("c", "d", Report(3)).metrics["nan"] = std::numeric_limits<double>::quiet_NaN();
  StepLedger copy(2);
  ASSERT_TRUE(copy.FromJson(nlohmann::json::parse(ledger.ToJson().dump())).ok());
  EXPECT_EQ(copy.size(), 2u);
  EXPECT_FALSE(copy.Contains("run \"x\"", "a"));
  EXPECT_EQ(copy.Find("run \"x\"", "b", "d").value(), expected);
  EXPECT_TRUE(std::isnan(copy.Find("run \"x\"", "c", "d").value()->metrics.at("nan")));

  for (const char* broken : {"{}", "[[1]]", "[{}]", R"([{"request_id": 1}])"}) {
    EXPECT_EQ(copy.FromJson(nlohmann::json::parse(broken)).code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_EQ(copy.size(), 2u);
}

}  // namespace
}  // namespace tandem::training
