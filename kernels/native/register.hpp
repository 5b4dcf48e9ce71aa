// The parts of the module `_native`: one function for each file register_*.cpp, called in module.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier {

void register_block_table(nanobind::module_& module);
void register_checksum(nanobind::module_& module);
void register_copy_plan(nanobind::module_& module);
void register_device_plan(nanobind::module_& module);
void register_driver_loops(nanobind::module_& module);
void register_event_log(nanobind::module_& module);
void register_hold_counts(nanobind::module_& module);
void register_index_page(nanobind::module_& module);
void register_pool(nanobind::module_& module);
void register_shadow(nanobind::module_& module);
void register_slab_io(nanobind::module_& module);
void register_words(nanobind::module_& module);

}  // namespace kvtier
