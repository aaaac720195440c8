// Runs a speculator on hidden states and tokens, for comparison with modules of PyTorch.
//
//   tandem-speculator-probe --speculator DIR --input in.safetensors --output out.safetensors
//                           [--save DIR]
//
// Input: hidden [T, d], tokens, labels [T], and offsets [S + 1] of a packed batch.
// Output, in float32: logits.<head> [N, V] of the N rows with targets, drafts [T, n_predict] from
// every token, head_losses and correct [n_predict], and grad.<name> of the parameters that train.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/speculator/adapters/speculator_loss.h"
#include "common/speculator/speculator_files.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem::speculator {
namespace {

std::vector<int64_t> Ids(const at::Tensor& tensor) {
  const int64_t* const ids = tensor.const_data_ptr<int64_t>();
  return {ids, ids + tensor.numel()};
}

absl::StatusOr<at::Tensor> Read(const SafetensorsFile& file, const char* name) {
  const TensorView* const view = file.Find(name);
  if (view == nullptr) return absl::InvalidArgumentError(absl::StrCat("no tensor ", name));
  return ToAten(*view);
}

// Appends the logits of the rows that have targets, in the order of AlignRows.
absl::Status AppendLogits(const Speculator& speculator, const SpeculatorBatch& batch,
                          NamedTensors& output) {
  const at::NoGradGuard no_grad;
  const int64_t n_predict = speculator.sizes().n_predict;
  TANDEM_ASSIGN_OR_RETURN(
      const SpeculatorRows rows,
      AlignRows(batch.sequences, batch.labels, n_predict, speculator.num_token_ids()));
  const at::Tensor positions = at::tensor(rows.positions, at::kLong);
  std::vector<at::Tensor> tokens;
  for (int64_t step = 0; step < n_predict; ++step) {
    tokens.push_back(batch.tokens.index_select(0, positions + (step + 1)));
  }
  const std::vector<at::Tensor> states = speculator.States(
      {.hidden = batch.hidden.index_select(0, positions), .offsets = rows.offsets}, tokens);
  for (int64_t head = 0; head < n_predict; ++head) {
    output.emplace_back(absl::StrCat("logits.", head),
                        speculator.Logits(head, states[static_cast<size_t>(head)]));
  }
  return absl::OkStatus();
}

absl::Status Run(const std::string& directory, const std::string& input_path,
                 const std::string& output_path, const std::string& save) {
  TANDEM_ASSIGN_OR_RETURN(const auto speculator,
                          LoadSpeculator(directory, {.requires_grad = true}));
  TANDEM_ASSIGN_OR_RETURN(const auto input, SafetensorsFile::Open(input_path));
  TANDEM_ASSIGN_OR_RETURN(const at::Tensor hidden, Read(*input, "hidden"));
  TANDEM_ASSIGN_OR_RETURN(const at::Tensor tokens, Read(*input, "tokens"));
  TANDEM_ASSIGN_OR_RETURN(const at::Tensor labels, Read(*input, "labels"));
  TANDEM_ASSIGN_OR_RETURN(const at::Tensor offsets, Read(*input, "offsets"));
  const SpeculatorBatch batch = {.hidden = hidden,
                                 .tokens = tokens,
                                 .sequences = PackedSequences(Ids(offsets)),
                                 .labels = Ids(labels)};
  NamedTensors output;
  TANDEM_RETURN_IF_ERROR(AppendLogits(*speculator, batch, output));
  TANDEM_ASSIGN_OR_RETURN(const at::Tensor drafts,
                          speculator->Draft(hidden, tokens, speculator->sizes().n_predict));
  output.emplace_back("drafts", drafts);
  TANDEM_ASSIGN_OR_RETURN(const SpeculatorLossReport report,
                          SpeculatorLoss(*speculator).ForwardBackward(batch));
  std::vector<double> losses, correct;
  for (const HeadReport& head : report.heads) {
    losses.push_back(head.loss);
    correct.push_back(static_cast<double>(head.correct));
  }
  output.emplace_back("head_losses", at::tensor(losses, at::kFloat));
  output.emplace_back("correct", at::tensor(correct, at::kFloat));
  for (const SpeculatorParameter& parameter : speculator->parameters()) {
    output.emplace_back("grad." + parameter.spec.name, parameter.value.grad());
  }
  if (!save.empty()) TANDEM_RETURN_IF_ERROR(SaveSpeculator(*speculator, save));
  return WriteNamedTensors(output_path, output, DType::kFloat32);
}

}  // namespace
}  // namespace tandem::speculator

int main(int argc, char** argv) {
  CLI::App app("Runs a speculator and writes logits, drafts, losses and gradients");
  std::string directory, input, output, save;
  app.add_option("--speculator", directory, "directory")->required();
  app.add_option("--input", input, "safetensors file")->required();
  app.add_option("--output", output, "safetensors file")->required();
  app.add_option("--save", save, "directory to save the speculator to");
  CLI11_PARSE(app, argc, argv);
  try {
    const absl::Status status = tandem::speculator::Run(directory, input, output, save);
    if (status.ok()) return 0;
    std::cerr << status << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
