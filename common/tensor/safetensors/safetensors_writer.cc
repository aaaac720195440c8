#include "common/tensor/safetensors/safetensors_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

absl::Status TensorError(absl::string_view path, absl::string_view tensor, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": tensor '", tensor, "': ", what));
}

std::string Describe(DType dtype, const std::vector<int64_t>& shape) {
  return absl::StrCat(DTypeName(dtype), " [", absl::StrJoin(shape, ", "), "]");
}

// The header's length, little endian, and the header, padded so that the tensors are aligned.
std::string Framed(const nlohmann::json& header) {
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string framed;
  for (int i = 0; i < 8; ++i) {
    framed.push_back(static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i)));
  }
  return framed + text;
}

}  // namespace

std::vector<size_t> InFileOrder(absl::Span<const DType> dtypes) {
  std::vector<size_t> order(dtypes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return ItemSizeBytes(dtypes[a]) > ItemSizeBytes(dtypes[b]);
  });
  return order;
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, absl::Span<const WeightSpec> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<DType> dtypes;
  for (const WeightSpec& tensor : tensors) dtypes.push_back(tensor.dtype);
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::map<std::string, Place> places;
  int64_t offset = 0;
  for (const size_t index : InFileOrder(dtypes)) {
    const WeightSpec* const tensor = &tensors[index];
    if (tensor->name == "__metadata__" || header.contains(tensor->name)) {
      return TensorError(path, tensor->name, "appears twice or is reserved");
    }
    const int64_t end = offset + tensor->bytes();
    header[tensor->name] = {{"dtype", std::string(DTypeName(tensor->dtype))},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, end}}};
    places[tensor->name] = {.spec = *tensor, .offset = offset};
    offset = end;
  }
  const std::string head = Framed(header);
  for (auto& [name, place] : places) place.offset += static_cast<int64_t>(head.size());

  TANDEM_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(path, FileWriter::Place::kBeside));
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(std::move(file)));
  writer->places_ = std::move(places);
  TANDEM_RETURN_IF_ERROR(writer->file_.Append(head));
  return writer;
}

const WeightSpec* SafetensorsWriter::Find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &found->second.spec;
}

absl::StatusOr<SafetensorsWriter::Place*> SafetensorsWriter::Expect(const WeightSpec& tensor) {
  const auto found = places_.find(tensor.name);
  if (found == places_.end()) {
    return TensorError(file_.path(), tensor.name, "the file has no such tensor");
  }
  Place& place = found->second;
  if (place.begun) return TensorError(file_.path(), tensor.name, "is given twice");
  if (tensor.dtype != place.spec.dtype || tensor.shape != place.spec.shape) {
    return TensorError(file_.path(), tensor.name,
                       absl::StrCat("is ", Describe(tensor.dtype, tensor.shape), ", expected ",
                                    Describe(place.spec.dtype, place.spec.shape)));
  }
  return &place;
}

absl::Status SafetensorsWriter::Write(const TensorView& tensor) {
  TANDEM_ASSIGN_OR_RETURN(
      Place* const place,
      Expect({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape}));
  const auto bytes = static_cast<int64_t>(tensor.bytes);
  if (bytes != place->spec.bytes()) return WrongBytes(*place, bytes);
  place->begun = true;
  return Append(tensor.name, {tensor.data, tensor.bytes});
}

absl::Status SafetensorsWriter::Begin(const WeightSpec& tensor) {
  TANDEM_ASSIGN_OR_RETURN(Place* const place, Expect(tensor));
  place->begun = true;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::WrongBytes(const Place& place, int64_t bytes) const {
  return TensorError(
      file_.path(), place.spec.name,
      absl::StrCat("shape and dtype need ", place.spec.bytes(), " bytes, ", bytes, " given"));
}

absl::Status SafetensorsWriter::Append(const std::string& name, absl::Span<const std::byte> bytes) {
  const auto found = places_.find(name);
  if (found == places_.end() || !found->second.begun) {
    return TensorError(file_.path(), name, "bytes are given before the tensor is begun");
  }
  Place& place = found->second;
  const int64_t end = place.written + static_cast<int64_t>(bytes.size());
  if (end > place.spec.bytes()) return WrongBytes(place, end);
  TANDEM_RETURN_IF_ERROR(file_.WriteAt(place.offset + place.written, bytes));
  place.written = end;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  for (const auto& [name, place] : places_) {
    if (!place.begun) return TensorError(file_.path(), name, "was not given");
    if (place.written < place.spec.bytes()) return WrongBytes(place, place.written);
  }
  return file_.Finish();
}

}  // namespace tandem
