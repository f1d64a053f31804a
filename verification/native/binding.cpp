// The module of a solution in the `paper` form: what its files have registered.
#include "binding_registry.h"

PYBIND11_MODULE(cuda_extension, module) {
    BindingRegistry::getInstance().applyBindings(module);
}
