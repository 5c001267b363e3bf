/* The product for files that have no wider registers: packed for few rows, panels for many. */
#ifndef LESONNX_X86_256_MULTIPLY_H
#define LESONNX_X86_256_MULTIPLY_H

#define PANEL_ROWS 12 /* from here on, unpacking once pays for its writes */

static void run_panel(const lesonnx_product *p, const columns *c, const scale_map *map) {
    const lesonnx_format *f = p->format;
    const int full = f->bits == 8;
    switch (full * 16 + f->vectors * 2 + map->uniform) {
        case 16 + 9: run_8_4u(p, c, map); break;
        case 16 + 5: run_8_2u(p, c, map); break;
        case 16 + 3: run_8_1u(p, c, map); break;
        case 16 + 2: run_8_1s(p, c, map); break;
        case 9: run_columns(p, c, 8, 0, 4, 1, map); break;
        case 8: run_columns(p, c, 8, 0, 4, 0, map); break;
        case 5: run_columns(p, c, 8, 0, 2, 1, map); break;
        default: run_columns(p, c, 8, 0, 2, 0, map); break;
    }
}

static void multiply(const lesonnx_product *p) {
    const lesonnx_format *f = p->format;
    if (f->bits == 32) {
        multiply_float(p);
        return;
    }
    const scale_map map = scale_map_of(f);
    if (p->m < PANEL_ROWS || (f->bits == 8 && f->full_steps == f->steps)) {
        const columns c = packed_columns(p);
        run_packed(p, &c, &map);
        return;
    }
    const int64_t width = panel_columns(f);
    for (int64_t n = p->first; n < p->last; n += width) {
        const columns c = unpack_panel(p, n, lesonnx_min(n + width, p->last), p->scratch);
        run_panel(p, &c, &map);
    }
}

static size_t scratch_bytes(const lesonnx_format *f, int64_t m) {
    return f->bits == 32 || m < PANEL_ROWS ? 0 : (size_t)(panel_columns(f) * panel_column_bytes(f));
}

#endif
