// Written by src/regard/backends/native/header.py, which tells how to write it again. Do not edit.
#pragma once
#include "steps/bias.h"
#include "steps/clamp.h"
#include "steps/log_distance.h"
#include "steps/offsets.h"
#include "steps/power_distance.h"
#include "steps/program.h"
#include "steps/slopes.h"
#include "steps/softcap.h"
#include "steps/temperature.h"

namespace regard {

// The modifiers of the kernels in the order in which they are applied: that of STEPS in modifiers/table.py.
using Modifiers = ModifierList<
    SoftCap,
    Temperature,
    Clamp,
    Slopes,
    LogDistance,
    PowerDistance,
    Offsets,
    Bias,
    LastSoftCap,
    Program>;

}  // namespace regard
