// Runs a model on token ids and writes its outputs, for comparison with `transformers`.
//
//   tandem-model-probe --model DIR --request request.json --output out.safetensors
//                      [--device cpu|cuda] [--dtype float32|bfloat16|bfloat16-inputs]
//                      [--kernels auto|aten] [--product_rows n]
//
// A request, or an array of requests, each with a "name" that prefixes its outputs:
//          {"sequences": [[ids...]...], "head": "lm" | "value", "untie_embeddings": bool,
//           "cached_chunks": [n...],  // optional: runs with a KV cache, in chunks of these sizes
//           "num_token_ids": n,       // optional: rows of the embedding from n on are padding
//           "pixel_values": safetensors file with one tensor for each image, "0", "1" ...
//           "images": [[{"name": tensor, "grid": [t, h, w], "video": bool, "seconds": s}...]...],
//                                     // of each sequence; one tensor may be in several
//           "router_aux_loss_coef": x, "router_z_loss_coef": x,  // optional, with gradients
//           "gradients": bool, "seed": value-head seed, "save": directory to export to}
// Output, in float32: hidden [T, H]; logits [T, V] or values [T]; with gradients, loss [] and
// grad.<name>. The loss is the mean cross-entropy of the next tokens, or the mean of v^2. With
// coefficients the gradients are those of the routers' losses, too, which are router_aux_loss []
// and router_z_loss [].
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/base/errors/status_macros.h"
#include "common/model/model.h"
#include "common/model/passes/router_losses.h"
#include "common/model/testing/cached_sequences.h"
#include "common/ops/ops.h"
#include "common/ops/products/fixed_rows.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem {
namespace {

using Sequences = std::vector<std::vector<int64_t>>;

void AppendHead(const Model& model, const at::Tensor& hidden, NamedTensors& output) {
  output.emplace_back("hidden", hidden);
  if (model.head() == HeadKind::kLm) {
    output.emplace_back("logits", model.ForwardLogits(hidden));
  } else {
    output.emplace_back("values", model.Values(hidden));
  }
}

// Reads the images of each sequence, all of which is a prompt; none for a request without images.
absl::StatusOr<std::vector<PromptImages>> ReadImages(const nlohmann::json& request,
                                                     const ModelConfig& config,
                                                     const Sequences& sequences) {
  std::vector<PromptImages> images;
  if (!request.contains("images")) return images;
  TANDEM_ASSIGN_OR_RETURN(const auto file, SafetensorsFile::Open(request["pixel_values"]));
  std::map<std::string, Blob> blobs;
  for (size_t s = 0; s < sequences.size(); ++s) {
    PromptImages& prompt = images.emplace_back();
    std::vector<ImageShape> shapes;
    for (const nlohmann::json& image : request["images"][s]) {
      const std::string name = image["name"];
      const auto grid = image["grid"].get<std::vector<int64_t>>();
      shapes.push_back({.grid = {.frames = grid[0], .height = grid[1], .width = grid[2]},
                        .is_video = image.value("video", false),
                        .seconds_per_grid = image.value("seconds", 1.0)});
      if (!blobs.contains(name)) {
        const at::Tensor pixels = AliasAsAten(*file->Find(name)).contiguous();
        blobs[name] = std::make_shared<const std::string>(
            static_cast<const char*>(pixels.const_data_ptr()), pixels.nbytes());
      }
      prompt.inputs.push_back({.shape = shapes.back(), .digest = name, .pixels = blobs.at(name)});
    }
    const std::vector<int32_t> tokens(sequences[s].begin(), sequences[s].end());
    TANDEM_ASSIGN_OR_RETURN(prompt.found, FindImages(*config.vision, tokens, {}, shapes));
  }
  return images;
}

at::Tensor Loss(const Model& model, const at::Tensor& hidden, const Sequences& sequences) {
  if (model.head() == HeadKind::kValue) {
    return model.Values(hidden).to(at::kFloat).pow(2).mean();
  }
  std::vector<int64_t> labels;
  for (const auto& sequence : sequences) {
    labels.insert(labels.end(), sequence.begin() + 1, sequence.end());
    labels.push_back(-100);
  }
  return at::cross_entropy_loss(model.ForwardLogits(hidden).to(at::kFloat),
                                at::tensor(labels, at::kLong).to(model.device()));
}

// Returns the hidden states of all tokens, computed with a KV cache. The sequences run side by
// side, in chunks of the sizes `chunks`, which repeat.
absl::StatusOr<at::Tensor> CachedHidden(const Model& model, const Sequences& sequences,
                                        const std::vector<PromptImages>& images,
                                        const std::vector<int64_t>& chunks) {
  int64_t longest = 0;
  for (const auto& sequence : sequences) {
    longest = std::max(longest, static_cast<int64_t>(sequence.size()));
  }
  CachedSequences cached(model, static_cast<int64_t>(sequences.size()), longest);
  std::vector<std::vector<at::Tensor>> hidden(sequences.size());
  for (size_t step = 0;; ++step) {
    std::vector<CachedSequences::Input> inputs;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const auto owner = static_cast<int64_t>(s);
      const absl::Span<const int64_t> rest =
          absl::MakeConstSpan(sequences[s]).subspan(cached.cursor(owner));
      if (rest.empty()) continue;
      const absl::Span<const int64_t> chunk = rest.subspan(0, chunks[step % chunks.size()]);
      inputs.push_back({owner, chunk, static_cast<int64_t>(chunk.size()),
                        images.empty() ? nullptr : &images[s]});
    }
    if (inputs.empty()) break;
    TANDEM_ASSIGN_OR_RETURN(const at::Tensor rows, cached.Decode(inputs));
    int64_t begin = 0;
    for (const CachedSequences::Input& input : inputs) {
      hidden[input.sequence].push_back(rows.narrow(0, begin, input.num_output_rows));
      begin += input.num_output_rows;
    }
  }
  std::vector<at::Tensor> all;
  for (const auto& rows : hidden) all.insert(all.end(), rows.begin(), rows.end());
  return at::cat(all, 0);
}

std::shared_ptr<RouterLosses> MakeRouterLosses(const nlohmann::json& request, const Model& model,
                                               int64_t tokens) {
  const ExpertOptions& experts = model.config().decoder.experts;
  const int64_t layers = model.config().num_hidden_layers;
  const auto choices = static_cast<double>(tokens * experts.LayersBefore(layers));
  return std::make_shared<RouterLosses>(
      experts, layers,
      RouterLosses::Scales{
          .load_balancing = request["router_aux_loss_coef"].get<double>() / choices,
          .z = request["router_z_loss_coef"].get<double>() / choices},
      model.device());
}

void AppendRouterLosses(const RaggedBatch& batch, NamedTensors& output) {
  if (batch.routing.losses == nullptr) return;
  const at::Tensor& sums = batch.routing.losses->sums();
  const int64_t experts = sums.size(1) - 2;
  const auto choices = static_cast<double>(batch.num_tokens() * sums.size(0));
  const at::Tensor means = sums.sum(0) / choices;
  output.emplace_back("router_aux_loss", means[experts]);
  output.emplace_back("router_z_loss", means[experts + 1]);
}

absl::StatusOr<NamedTensors> Run(const std::string& directory, const nlohmann::json& request,
                                 const Placement& placement) {
  const bool gradients = request.value("gradients", false);
  const auto sequences = request.at("sequences").get<Sequences>();
  LoadOptions options;
  options.head = request.value("head", "lm") == "value" ? HeadKind::kValue : HeadKind::kLm;
  options.untie_embeddings = request.value("untie_embeddings", false);
  options.value_head_seed = request.value("seed", uint64_t{0});
  options.num_token_ids = request.value("num_token_ids", int64_t{0});
  options.requires_grad = gradients;
  options.placement = placement;
  TANDEM_ASSIGN_OR_RETURN(const auto model, Model::Load(directory, options));
  TANDEM_ASSIGN_OR_RETURN(const std::vector<PromptImages> images,
                          ReadImages(request, model->config(), sequences));
  NamedTensors output;
  if (request.contains("cached_chunks")) {
    c10::InferenceMode guard;
    TANDEM_ASSIGN_OR_RETURN(const at::Tensor hidden,
                            CachedHidden(*model, sequences, images,
                                         request["cached_chunks"].get<std::vector<int64_t>>()));
    AppendHead(*model, hidden, output);
  } else {
    const c10::InferenceMode guard(!gradients);
    CausalContext causal;
    RaggedBatch batch = MakeRaggedBatch(sequences, model->device());
    if (!images.empty()) {
      ImageBatch collected(*model->config().vision);
      for (size_t s = 0; s < sequences.size(); ++s) {
        collected.AddTokens(&images[s], 0, static_cast<int64_t>(sequences[s].size()));
      }
      batch.images = collected.Take(model->device());
    }
    if (request.contains("router_aux_loss_coef")) {
      batch.routing.losses = MakeRouterLosses(request, *model, batch.num_tokens());
    }
    const at::Tensor hidden = model->HiddenStates(batch, causal);
    AppendHead(*model, hidden, output);
    AppendRouterLosses(batch, output);
    if (gradients) {
      const at::Tensor loss = Loss(*model, hidden, sequences);
      loss.backward();
      output.emplace_back("loss", loss);
      for (const auto& [name, parameter] : model->Parameters()) {
        if (!parameter.requires_grad()) continue;
        // An expert that no token chose has no gradient, nor has a vision tower without images.
        const at::Tensor gradient = parameter.grad();
        output.emplace_back("grad." + name,
                            gradient.defined() ? gradient : at::zeros_like(parameter));
      }
    }
  }
  if (request.contains("save")) {
    TANDEM_RETURN_IF_ERROR(model->Save(request["save"].get<std::string>()));
  }
  return output;
}

absl::Status RunAll(const std::string& directory, const nlohmann::json& requests,
                    const Placement& placement, const std::string& output_path) {
  if (!requests.is_array()) {
    return RunAll(directory, nlohmann::json::array({requests}), placement, output_path);
  }
  NamedTensors all;
  for (const nlohmann::json& request : requests) {
    const std::string prefix =
        request.contains("name") ? request["name"].get<std::string>() + "." : "";
    TANDEM_ASSIGN_OR_RETURN(const NamedTensors output, Run(directory, request, placement));
    for (const auto& [name, tensor] : output) all.emplace_back(prefix + name, tensor);
  }
  return WriteNamedTensors(output_path, all, DType::kFloat32);
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  CLI::App app("Runs a model on token ids and writes hidden states, logits and gradients");
  std::string model, request, output, device = "cpu", dtype = "float32", kernels = "auto";
  app.add_option("--model", model, "Hugging Face directory")->required();
  app.add_option("--request", request, "JSON file")->required();
  app.add_option("--output", output, "safetensors file")->required();
  app.add_option("--device", device)->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", dtype)
      ->check(CLI::IsMember({"float32", "bfloat16", "bfloat16-inputs"}));
  app.add_option("--kernels", kernels)->check(CLI::IsMember({"auto", "aten"}));
  int64_t product_rows = 0;
  app.add_option("--product_rows", product_rows);
  CLI11_PARSE(app, argc, argv);
  try {
    tandem::ops::SetProductRows(product_rows);
    tandem::ops::SetKernelPath(kernels == "aten" ? tandem::ops::KernelPath::kAten
                                                 : tandem::ops::KernelPath::kAuto);
    tandem::Placement placement = {.device = at::Device(device),
                                   .dtype = dtype == "bfloat16" ? at::kBFloat16 : at::kFloat};
    if (dtype == "bfloat16-inputs") {
      placement.weight_dtype = placement.activation_dtype = at::kBFloat16;
    }
    const absl::Status status =
        tandem::RunAll(model, nlohmann::json::parse(std::ifstream(request)), placement, output);
    if (status.ok()) return 0;
    std::cerr << status << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
