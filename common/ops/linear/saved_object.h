// Objects that an autograd function keeps for its backward pass, beside tensors and numbers:
//
//   context->saved_data["group"] = SaveObject(group);
//   const std::shared_ptr<Group> group = SavedObject<Group>(context->saved_data["group"]);
#ifndef TANDEM_COMMON_OPS_LINEAR_SAVED_OBJECT_H_
#define TANDEM_COMMON_OPS_LINEAR_SAVED_OBJECT_H_

#include <ATen/core/ivalue.h>

#include <memory>
#include <utility>

namespace tandem::ops {

template <typename T>
struct ObjectHolder : torch::CustomClassHolder {
  explicit ObjectHolder(std::shared_ptr<T> held) : object(std::move(held)) {}
  const std::shared_ptr<T> object;
};

// Wraps an object, which then lives as long as the graph.
template <typename T>
at::IValue SaveObject(std::shared_ptr<T> object) {
  return at::IValue::make_capsule(c10::make_intrusive<ObjectHolder<T>>(std::move(object)));
}

template <typename T>
std::shared_ptr<T> SavedObject(const at::IValue& saved) {
  return c10::static_intrusive_pointer_cast<ObjectHolder<T>>(saved.toCapsule())->object;
}

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_LINEAR_SAVED_OBJECT_H_
