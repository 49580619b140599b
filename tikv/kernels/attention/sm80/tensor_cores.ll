; What tensor cores do for kernels of attention: functions on 32-bit registers, which LLVM inlines.
;
; `a`, `b` and `c` are the fragments of mma.sync.m16n8k16 as PTX defines them, halves in pairs. Pointers are to local
; variables of a kernel, the only ones that Taichi hands out. Assembled, also after every change of this file, by
;
;     llvm-as-14 tensor_cores.ll -o tensor_cores.bc

target triple = "nvptx64-nvidia-cuda"

; c += a b
define void @multiply_f16(float* %p0, float* %p1, float* %p2, float* %p3, i32* %pa0, i32* %pa1, i32* %pa2, i32* %pa3, i32* %pb0, i32* %pb1) alwaysinline convergent {
  %c0 = load float, float* %p0
  %c1 = load float, float* %p1
  %c2 = load float, float* %p2
  %c3 = load float, float* %p3
  %a0 = load i32, i32* %pa0
  %a1 = load i32, i32* %pa1
  %a2 = load i32, i32* %pa2
  %a3 = load i32, i32* %pa3
  %b0 = load i32, i32* %pb0
  %b1 = load i32, i32* %pb1
  %d = call { float, float, float, float } asm "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"(i32 %a0, i32 %a1, i32 %a2, i32 %a3, i32 %b0, i32 %b1, float %c0, float %c1, float %c2, float %c3) convergent
  %d0 = extractvalue { float, float, float, float } %d, 0
  %d1 = extractvalue { float, float, float, float } %d, 1
  %d2 = extractvalue { float, float, float, float } %d, 2
  %d3 = extractvalue { float, float, float, float } %d, 3
  store float %d0, float* %p0
  store float %d1, float* %p1
  store float %d2, float* %p2
  store float %d3, float* %p3
  ret void
}

; c += a b, a from pairs of columns of the rows 2n, 2n + 1, 2n + 8 and 2n + 9 that it has as its columns
define void @multiply_rows_f16(float* %p0, float* %p1, float* %p2, float* %p3, i32* %pa0, i32* %pa1, i32* %pa2, i32* %pa3, i32* %pb0, i32* %pb1) alwaysinline convergent {
  %c0 = load float, float* %p0
  %c1 = load float, float* %p1
  %c2 = load float, float* %p2
  %c3 = load float, float* %p3
  %v0 = load i32, i32* %pa0
  %v1 = load i32, i32* %pa1
  %v2 = load i32, i32* %pa2
  %v3 = load i32, i32* %pa3
  %b0 = load i32, i32* %pb0
  %b1 = load i32, i32* %pb1
  %a0 = call i32 asm "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r"(i32 %v0, i32 %v1)
  %a1 = call i32 asm "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r"(i32 %v0, i32 %v1)
  %a2 = call i32 asm "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r"(i32 %v2, i32 %v3)
  %a3 = call i32 asm "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r"(i32 %v2, i32 %v3)
  %d = call { float, float, float, float } asm "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"(i32 %a0, i32 %a1, i32 %a2, i32 %a3, i32 %b0, i32 %b1, float %c0, float %c1, float %c2, float %c3) convergent
  %d0 = extractvalue { float, float, float, float } %d, 0
  %d1 = extractvalue { float, float, float, float } %d, 1
  %d2 = extractvalue { float, float, float, float } %d, 2
  %d3 = extractvalue { float, float, float, float } %d, 3
  store float %d0, float* %p0
  store float %d1, float* %p1
  store float %d2, float* %p2
  store float %d3, float* %p3
  ret void
}

; two floats, rounded to the nearest, as halves of a register
define void @pack_f16(i32* %r, float* %plow, float* %phigh) alwaysinline {
  %low = load float, float* %plow
  %high = load float, float* %phigh
  %x = call i32 asm "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f"(float %high, float %low)
  store i32 %x, i32* %r
  ret void
}

; c += a b
define void @multiply_bf16(float* %p0, float* %p1, float* %p2, float* %p3, i32* %pa0, i32* %pa1, i32* %pa2, i32* %pa3, i32* %pb0, i32* %pb1) alwaysinline convergent {
  %c0 = load float, float* %p0
  %c1 = load float, float* %p1
  %c2 = load float, float* %p2
  %c3 = load float, float* %p3
  %a0 = load i32, i32* %pa0
  %a1 = load i32, i32* %pa1
  %a2 = load i32, i32* %pa2
  %a3 = load i32, i32* %pa3
  %b0 = load i32, i32* %pb0
  %b1 = load i32, i32* %pb1
  %d = call { float, float, float, float } asm "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"(i32 %a0, i32 %a1, i32 %a2, i32 %a3, i32 %b0, i32 %b1, float %c0, float %c1, float %c2, float %c3) convergent
  %d0 = extractvalue { float, float, float, float } %d, 0
  %d1 = extractvalue { float, float, float, float } %d, 1
  %d2 = extractvalue { float, float, float, float } %d, 2
  %d3 = extractvalue { float, float, float, float } %d, 3
  store float %d0, float* %p0
  store float %d1, float* %p1
  store float %d2, float* %p2
  store float %d3, float* %p3
  ret void
}

; c += a b, a from pairs of columns of the rows 2n, 2n + 1, 2n + 8 and 2n + 9 that it has as its columns
define void @multiply_rows_bf16(float* %p0, float* %p1, float* %p2, float* %p3, i32* %pa0, i32* %pa1, i32* %pa2, i32* %pa3, i32* %pb0, i32* %pb1) alwaysinline convergent {
  %c0 = load float, float* %p0
  %c1 = load float, float* %p1
  %c2 = load float, float* %p2
  %c3 = load float, float* %p3
  %v0 = load i32, i32* %pa0
  %v1 = load i32, i32* %pa1
  %v2 = load i32, i32* %pa2
  %v3 = load i32, i32* %pa3
  %b0 = load i32, i32* %pb0
  %b1 = load i32, i32* %pb1
  %a0 = call i32 asm "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r"(i32 %v0, i32 %v1)
  %a1 = call i32 asm "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r"(i32 %v0, i32 %v1)
  %a2 = call i32 asm "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r"(i32 %v2, i32 %v3)
  %a3 = call i32 asm "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r"(i32 %v2, i32 %v3)
  %d = call { float, float, float, float } asm "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};", "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"(i32 %a0, i32 %a1, i32 %a2, i32 %a3, i32 %b0, i32 %b1, float %c0, float %c1, float %c2, float %c3) convergent
  %d0 = extractvalue { float, float, float, float } %d, 0
  %d1 = extractvalue { float, float, float, float } %d, 1
  %d2 = extractvalue { float, float, float, float } %d, 2
  %d3 = extractvalue { float, float, float, float } %d, 3
  store float %d0, float* %p0
  store float %d1, float* %p1
  store float %d2, float* %p2
  store float %d3, float* %p3
  ret void
}

; two floats, rounded to the nearest, as halves of a register
define void @pack_bf16(i32* %r, float* %plow, float* %phigh) alwaysinline {
  %low = load float, float* %plow
  %high = load float, float* %phigh
  %x = call i32 asm "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"(float %high, float %low)
  store i32 %x, i32* %r
  ret void
}

; 2 ** x, within 2 ** -22 of it relatively; subnormals are 0
define void @exp2(float* %r, float* %px) alwaysinline {
  %x = load float, float* %px
  %y = call float asm "ex2.approx.ftz.f32 $0, $1;", "=f,f"(float %x)
  store float %y, float* %r
  ret void
}

; c += a b, rounded once
define void @add_product(float* %pc, float* %pa, float* %pb) alwaysinline {
  %c = load float, float* %pc
  %a = load float, float* %pa
  %b = load float, float* %pb
  %d = call float asm "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"(float %a, float %b, float %c)
  store float %d, float* %pc
  ret void
}

; Codes of 8 bits, two halves of a register each: their bits below those of 1024, times a factor, plus an offset
define void @halves_8(i32* %p0, i32* %p1, i32* %px, i32* %pf, i32* %po) alwaysinline {
  %x = load i32, i32* %px
  %f = load i32, i32* %pf
  %o = load i32, i32* %po
  %a0 = call i32 asm "prmt.b32 $0, $1, $2, 0x4140;", "=r,r,r"(i32 %x, i32 1684300900)
  %a1 = call i32 asm "prmt.b32 $0, $1, $2, 0x4342;", "=r,r,r"(i32 %x, i32 1684300900)
  %y0 = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %a0, i32 %f, i32 %o)
  %y1 = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %a1, i32 %f, i32 %o)
  store i32 %y0, i32* %p0
  store i32 %y1, i32* %p1
  ret void
}

; The same of 4 bits, codes n and n + 4 in register n; every other one is 16 times as much, and has a factor and an
; offset of its own
define void @halves_4(i32* %p0, i32* %p1, i32* %p2, i32* %p3, i32* %px, i32* %pf, i32* %po, i32* %pf16, i32* %po16) alwaysinline {
  %x = load i32, i32* %px
  %f = load i32, i32* %pf
  %o = load i32, i32* %po
  %f16 = load i32, i32* %pf16
  %o16 = load i32, i32* %po16
  %s = lshr i32 %x, 8
  %a0 = call i32 asm "lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r"(i32 %x, i32 1677747200)
  %a1 = call i32 asm "lop3.b32 $0, $1, 0x00F000F0, $2, 0xEA;", "=r,r,r"(i32 %x, i32 1677747200)
  %a2 = call i32 asm "lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r"(i32 %s, i32 1677747200)
  %a3 = call i32 asm "lop3.b32 $0, $1, 0x00F000F0, $2, 0xEA;", "=r,r,r"(i32 %s, i32 1677747200)
  %y0 = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %a0, i32 %f, i32 %o)
  %y1 = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %a1, i32 %f16, i32 %o16)
  %y2 = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %a2, i32 %f, i32 %o)
  %y3 = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %a3, i32 %f16, i32 %o16)
  store i32 %y0, i32* %p0
  store i32 %y1, i32* %p1
  store i32 %y2, i32* %p2
  store i32 %y3, i32* %p3
  ret void
}

; Floats of 8 bits, two halves of a register each, all exact. What only compute capability 9.0 knows stands behind `//!`,
; as in `sm90/ir.py`
define void @halves_e4m3(i32* %p0, i32* %p1, i32* %px) alwaysinline {
  %x = load i32, i32* %px
  %y = call { i32, i32 } asm "//!{\0A\09//!.reg .b16 low, high;\0A\09//!mov.b32 {low, high}, $2;\0A\09//!cvt.rn.f16x2.e4m3x2 $0, low;\0A\09//!cvt.rn.f16x2.e4m3x2 $1, high;\0A\09//!}", "=&r,=r,r"(i32 %x)
  %y0 = extractvalue { i32, i32 } %y, 0
  %y1 = extractvalue { i32, i32 } %y, 1
  store i32 %y0, i32* %p0
  store i32 %y1, i32* %p1
  ret void
}

define void @halves_e5m2(i32* %p0, i32* %p1, i32* %px) alwaysinline {
  %x = load i32, i32* %px
  %y0 = call i32 asm "prmt.b32 $0, $1, 0, 0x1404;", "=r,r"(i32 %x)
  %y1 = call i32 asm "prmt.b32 $0, $1, 0, 0x3424;", "=r,r"(i32 %x)
  store i32 %y0, i32* %p0
  store i32 %y1, i32* %p1
  ret void
}

; The same of 4 bits, each half 2 ** -14 of its number: codes 0 and 2, 4 and 6, 1 and 3, 5 and 7. As e2m1 has two bits of
; e5m2's exponent and one of its fraction, codes first become such bytes
define void @halves_e2m1(i32* %p0, i32* %p1, i32* %p2, i32* %p3, i32* %px) alwaysinline {
  %x = load i32, i32* %px
  %even = shl i32 %x, 4
  %even_low = shl i32 %x, 1
  %odd_low = lshr i32 %x, 3
  %even_number = and i32 %even_low, 235802126
  %odd_number = and i32 %odd_low, 235802126
  %a = call i32 asm "lop3.b32 $0, $1, 0x80808080, $2, 0xEA;", "=r,r,r"(i32 %even, i32 %even_number)
  %b = call i32 asm "lop3.b32 $0, $1, 0x80808080, $2, 0xEA;", "=r,r,r"(i32 %x, i32 %odd_number)
  %y0 = call i32 asm "prmt.b32 $0, $1, 0, 0x1404;", "=r,r"(i32 %a)
  %y1 = call i32 asm "prmt.b32 $0, $1, 0, 0x3424;", "=r,r"(i32 %a)
  %y2 = call i32 asm "prmt.b32 $0, $1, 0, 0x1404;", "=r,r"(i32 %b)
  %y3 = call i32 asm "prmt.b32 $0, $1, 0, 0x3424;", "=r,r"(i32 %b)
  store i32 %y0, i32* %p0
  store i32 %y1, i32* %p1
  store i32 %y2, i32* %p2
  store i32 %y3, i32* %p3
  ret void
}

; two halves: x s + b, each rounded once
define void @scale_halves(i32* %r, i32* %px, i32* %ps, i32* %pb) alwaysinline {
  %x = load i32, i32* %px
  %s = load i32, i32* %ps
  %b = load i32, i32* %pb
  %y = call i32 asm "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"(i32 %x, i32 %s, i32 %b)
  store i32 %y, i32* %r
  ret void
}

; the two lower bytes of x and of y, by turns
define void @low_bytes(i32* %r, i32* %px, i32* %py) alwaysinline {
  %x = load i32, i32* %px
  %y = load i32, i32* %py
  %z = call i32 asm "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r"(i32 %x, i32 %y)
  store i32 %z, i32* %r
  ret void
}

; the two upper bytes of x and of y, by turns
define void @high_bytes(i32* %r, i32* %px, i32* %py) alwaysinline {
  %x = load i32, i32* %px
  %y = load i32, i32* %py
  %z = call i32 asm "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r"(i32 %x, i32 %y)
  store i32 %z, i32* %r
  ret void
}

; the lower half of x, and above it that of y
define void @low_halves(i32* %r, i32* %px, i32* %py) alwaysinline {
  %x = load i32, i32* %px
  %y = load i32, i32* %py
  %z = call i32 asm "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r"(i32 %x, i32 %y)
  store i32 %z, i32* %r
  ret void
}

; the upper half of y, and below it that of x
define void @high_halves(i32* %r, i32* %px, i32* %py) alwaysinline {
  %x = load i32, i32* %px
  %y = load i32, i32* %py
  %z = call i32 asm "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r"(i32 %x, i32 %y)
  store i32 %z, i32* %r
  ret void
}

; four registers of two halves without infinities and NaNs, 0 in their place; the signs of `found` tell of any. `step`
; carries their exponent, and no other, into the place of the sign
define void @clear_infinite(i32* %p0, i32* %p1, i32* %p2, i32* %p3, i32* %pfound, i32* %pstep) alwaysinline {
  %x0 = load i32, i32* %p0
  %x1 = load i32, i32* %p1
  %x2 = load i32, i32* %p2
  %x3 = load i32, i32* %p3
  %found = load i32, i32* %pfound
  %step = load i32, i32* %pstep
  %y = call { i32, i32, i32, i32, i32 } asm "{ .reg .b32 s; and.b32 s, $0, 0x7FFF7FFF; add.u32 s, s, $10; or.b32 $4, $4, s; prmt.b32 s, s, 0, 0xBB99; not.b32 s, s; and.b32 $0, $0, s; and.b32 s, $1, 0x7FFF7FFF; add.u32 s, s, $10; or.b32 $4, $4, s; prmt.b32 s, s, 0, 0xBB99; not.b32 s, s; and.b32 $1, $1, s; and.b32 s, $2, 0x7FFF7FFF; add.u32 s, s, $10; or.b32 $4, $4, s; prmt.b32 s, s, 0, 0xBB99; not.b32 s, s; and.b32 $2, $2, s; and.b32 s, $3, 0x7FFF7FFF; add.u32 s, s, $10; or.b32 $4, $4, s; prmt.b32 s, s, 0, 0xBB99; not.b32 s, s; and.b32 $3, $3, s; }", "=r,=r,=r,=r,=r,0,1,2,3,4,r"(i32 %x0, i32 %x1, i32 %x2, i32 %x3, i32 %found, i32 %step)
  %y0 = extractvalue { i32, i32, i32, i32, i32 } %y, 0
  %y1 = extractvalue { i32, i32, i32, i32, i32 } %y, 1
  %y2 = extractvalue { i32, i32, i32, i32, i32 } %y, 2
  %y3 = extractvalue { i32, i32, i32, i32, i32 } %y, 3
  %y4 = extractvalue { i32, i32, i32, i32, i32 } %y, 4
  store i32 %y0, i32* %p0
  store i32 %y1, i32* %p1
  store i32 %y2, i32* %p2
  store i32 %y3, i32* %p3
  store i32 %y4, i32* %pfound
  ret void
}

; What follows is for the native launcher on compute capability 9.0.
@copied_tiles = external addrspace(3) global [0 x i8], align 128

; where the shared memory of a block begins whose size the launch sets
define void @shared_memory(i32* %r) alwaysinline {
  %x = ptrtoint [0 x i8] addrspace(3)* @copied_tiles to i32
  store i32 %x, i32* %r
  ret void
}

; where k lies
define void @address_k(i64* %p0) alwaysinline {
  %r = call i64 asm "//!ld.param.u64 $0, [arguments+24];", "=l"()
  store i64 %r, i64* %p0
  ret void
}

; where v lies
define void @address_v(i64* %p0) alwaysinline {
  %r = call i64 asm "//!ld.param.u64 $0, [arguments+40];", "=l"()
  store i64 %r, i64* %p0
  ret void
}

; where the array after v lies
define void @address_behind_v(i64* %p0) alwaysinline {
  %r = call i64 asm "//!ld.param.u64 $0, [arguments+56];", "=l"()
  store i64 %r, i64* %p0
  ret void
}

; where the next one lies
define void @address_before_k_scale(i64* %p0) alwaysinline {
  %r = call i64 asm "//!ld.param.u64 $0, [arguments+72];", "=l"()
  store i64 %r, i64* %p0
  ret void
}

; where k_scale lies
define void @address_k_scale(i64* %p0) alwaysinline {
  %r = call i64 asm "//!ld.param.u64 $0, [arguments+88];", "=l"()
  store i64 %r, i64* %p0
  ret void
}

; where v_scale lies
define void @address_v_scale(i64* %p0) alwaysinline {
  %r = call i64 asm "//!ld.param.u64 $0, [arguments+104];", "=l"()
  store i64 %r, i64* %p0
  ret void
}

; 16 bytes to shared memory are under way
define void @copy_16(i32* %p0, i64* %p1) alwaysinline convergent {
  %x0 = load i32, i32* %p0
  %x1 = load i64, i64* %p1
  call void asm sideeffect "cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}"(i32 %x0, i64 %x1) convergent
  ret void
}

; 4 bytes to shared memory are under way
define void @copy_4(i32* %p0, i64* %p1) alwaysinline convergent {
  %x0 = load i32, i32* %p0
  %x1 = load i64, i64* %p1
  call void asm sideeffect "cp.async.ca.shared.global [$0], [$1], 4;", "r,l,~{memory}"(i32 %x0, i64 %x1) convergent
  ret void
}

; the copies since the last call are a group
define void @copies_commit() alwaysinline convergent {
  call void asm sideeffect "cp.async.commit_group;", "~{memory}"() convergent
  ret void
}

; the copies of all groups but the last 0 are done
define void @copies_wait_0() alwaysinline convergent {
  call void asm sideeffect "cp.async.wait_group 0;", "~{memory}"() convergent
  ret void
}

; the copies of all groups but the last 1 are done
define void @copies_wait_1() alwaysinline convergent {
  call void asm sideeffect "cp.async.wait_group 1;", "~{memory}"() convergent
  ret void
}

; the copies of all groups but the last 2 are done
define void @copies_wait_2() alwaysinline convergent {
  call void asm sideeffect "cp.async.wait_group 2;", "~{memory}"() convergent
  ret void
}

; the copies of all groups but the last 3 are done
define void @copies_wait_3() alwaysinline convergent {
  call void asm sideeffect "cp.async.wait_group 3;", "~{memory}"() convergent
  ret void
}

; all lanes of a warp see what each of them has written
define void @warp_meets() alwaysinline convergent {
  call void asm sideeffect "bar.warp.sync -1;", "~{memory}"() convergent
  ret void
}

; 16 bytes of shared memory
define void @read_16(i32* %p0, i32* %p1, i32* %p2, i32* %p3, i32* %p4) alwaysinline convergent {
  %x4 = load i32, i32* %p4
  %r = call { i32, i32, i32, i32 } asm sideeffect "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,~{memory}"(i32 %x4) convergent
  %y0 = extractvalue { i32, i32, i32, i32 } %r, 0
  store i32 %y0, i32* %p0
  %y1 = extractvalue { i32, i32, i32, i32 } %r, 1
  store i32 %y1, i32* %p1
  %y2 = extractvalue { i32, i32, i32, i32 } %r, 2
  store i32 %y2, i32* %p2
  %y3 = extractvalue { i32, i32, i32, i32 } %r, 3
  store i32 %y3, i32* %p3
  ret void
}

; 8 bytes of shared memory
define void @read_8(i32* %p0, i32* %p1, i32* %p2) alwaysinline convergent {
  %x2 = load i32, i32* %p2
  %r = call { i32, i32 } asm sideeffect "ld.shared.v2.u32 {$0, $1}, [$2];", "=r,=r,r,~{memory}"(i32 %x2) convergent
  %y0 = extractvalue { i32, i32 } %r, 0
  store i32 %y0, i32* %p0
  %y1 = extractvalue { i32, i32 } %r, 1
  store i32 %y1, i32* %p1
  ret void
}

; 4 bytes of shared memory
define void @read_4(i32* %p0, i32* %p1) alwaysinline convergent {
  %x1 = load i32, i32* %p1
  %r = call i32 asm sideeffect "ld.shared.u32 $0, [$1];", "=r,r,~{memory}"(i32 %x1) convergent
  store i32 %r, i32* %p0
  ret void
}

; 2 bytes of shared memory
define void @read_2(i32* %p0, i32* %p1) alwaysinline convergent {
  %x1 = load i32, i32* %p1
  %r = call i32 asm sideeffect "{\0A\09.reg .b16 h;\0A\09ld.shared.u16 h, [$1];\0A\09cvt.u32.u16 $0, h;\0A\09}", "=r,r,~{memory}"(i32 %x1) convergent
  store i32 %r, i32* %p0
  ret void
}

; a byte of shared memory
define void @read_1(i32* %p0, i32* %p1) alwaysinline convergent {
  %x1 = load i32, i32* %p1
  %r = call i32 asm sideeffect "{\0A\09.reg .b16 h;\0A\09ld.shared.u8 h, [$1];\0A\09cvt.u32.u16 $0, h;\0A\09}", "=r,r,~{memory}"(i32 %x1) convergent
  store i32 %r, i32* %p0
  ret void
}

; 2 bytes of the GPU's memory
define void @read_global_2(i32* %p0, i64* %p1) alwaysinline convergent {
  %x1 = load i64, i64* %p1
  %r = call i32 asm sideeffect "{\0A\09.reg .b16 h;\0A\09ld.global.u16 h, [$1];\0A\09cvt.u32.u16 $0, h;\0A\09}", "=r,l,~{memory}"(i64 %x1) convergent
  store i32 %r, i32* %p0
  ret void
}

; 2 bytes to shared memory
define void @write_2(i32* %p0, i32* %p1) alwaysinline convergent {
  %x0 = load i32, i32* %p0
  %x1 = load i32, i32* %p1
  call void asm sideeffect "{\0A\09.reg .b16 h;\0A\09cvt.u16.u32 h, $1;\0A\09st.shared.u16 [$0], h;\0A\09}", "r,r,~{memory}"(i32 %x0, i32 %x1) convergent
  ret void
}

; 4 bytes to shared memory
define void @write_4(i32* %p0, i32* %p1) alwaysinline convergent {
  %x0 = load i32, i32* %p0
  %x1 = load i32, i32* %p1
  call void asm sideeffect "st.shared.u32 [$0], $1;", "r,r,~{memory}"(i32 %x0, i32 %x1) convergent
  ret void
}
