#include "common/training/step_ledger.h"

#include <gtest/gtest.h>

#include "common/base/error.h"

namespace tandem::training {
namespace {

TEST(StepLedgerTest, RepeatGetsTheStoredReply) {
  StepLedger ledger;
  EXPECT_EQ(ledger.Find("run", "a", "d1").value(), std::nullopt);
  ledger.Record("run", "a", "d1", "reply");
  EXPECT_EQ(ledger.Find("run", "a", "d1").value(), "reply");
  EXPECT_EQ(ledger.Find("other", "a", "d1").value(), std::nullopt);
}

TEST(StepLedgerTest, RequestIdWithAnotherPayloadIsRefused) {
  StepLedger ledger;
  ledger.Record("run", "a", "d1", "reply");
  const absl::Status status = ledger.Find("run", "a", "d2").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Reason(status), "REQUEST_ID_REUSED");
}

TEST(StepLedgerTest, SurvivesSerialisationAndIsBounded) {
  StepLedger ledger(2);
  ledger.Record("run", "a", "d", "1");
  ledger.Record("run", "b", "d", "2\n\"");
  ledger.Record("run", "c", "d", "3");
  StepLedger copy(2);
  ASSERT_TRUE(copy.Deserialize(ledger.Serialize()).ok());
  EXPECT_EQ(copy.size(), 2u);
  EXPECT_EQ(copy.Find("run", "a", "d").value(), std::nullopt);
  EXPECT_EQ(copy.Find("run", "b", "d").value(), "2\n\"");
  EXPECT_EQ(copy.Deserialize("[[1]]").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(copy.Deserialize("nonsense").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(copy.size(), 2u);
}

}  // namespace
}  // namespace tandem::training
