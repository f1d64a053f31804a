// Bindings that register themselves: REGISTER_BINDING(name, function) at namespace scope has
// `void function(pybind11::module&)` called while the module `cuda_extension` is made.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

// Hidden, because the list would otherwise be shared by all libraries of a process that have one,
// and a second copy of a library must not find the functions of the first.
class __attribute__((visibility("hidden"))) BindingRegistry {
   public:
    using BindingFunction = std::function<void(pybind11::module&)>;

    // Made when the first file registers something.
    static BindingRegistry& getInstance() {
        static BindingRegistry registry;
        return registry;
    }

    int registerBinding(std::string name, BindingFunction function) {
        entries_.emplace_back(std::move(name), std::move(function));
        return static_cast<int>(entries_.size());
    }

    void applyBindings(pybind11::module& module) const {
        for (const auto& entry : entries_) entry.second(module);
    }

   private:
    BindingRegistry() = default;

    std::vector<std::pair<std::string, BindingFunction>> entries_;
};

#define REGISTER_BINDING(name, function)                            \
    static const int binding_of_##name [[maybe_unused]] =           \
        BindingRegistry::getInstance().registerBinding(             \
            #name, [](pybind11::module& module) { function(module); })
