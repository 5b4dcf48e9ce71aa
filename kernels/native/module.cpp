#include "register.hpp"

NB_MODULE(_native, module) {
    module.doc() = "The native core of kvtier. Use it through `kvtier_kernels`.";
    // A daemon may exit with live tables; the operating system takes their memory back.
    nanobind::set_leak_warnings(false);
    kvtier::register_index_page(module);
    kvtier::register_hold_counts(module);
    kvtier::register_shadow(module);
    kvtier::register_block_table(module);  // takes IndexPage, makes HoldCounts and PoolShadow
    kvtier::register_checksum(module);
    kvtier::register_copy_plan(module);
    kvtier::register_device_plan(module);
    kvtier::register_driver_loops(module);
    kvtier::register_event_log(module);
    kvtier::register_pool(module);
    kvtier::register_words(module);
    kvtier::register_slab_io(module);  // takes SharedWords
}
