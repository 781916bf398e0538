(** What a layer loses, chapter 352: behind a normalizer and a positive
    homogeneous activation phi, the factor s of the relative distance of two
    near inputs is 1 - b - D, for every finite list of places (an element of one
    input, with its value y and its unit's gamma and beta). The one condition is
    that phi is not 0 at all places. The slope of phi may be any number at 0,
    where it has none. *)
From Coq Require Import Reals List Lra.
From Coquelicot Require Import Coquelicot.
From normalnorm Require Import sums.
Import ListNotations.
Open Scope R_scope.

Record place := { y : R; gamma : R; beta : R }.

Definition positive_homogeneous (phi : R -> R) : Prop :=
  forall c v, 0 < c -> phi (c * v) = c * phi v.

(** dphi is the derivative of phi except, perhaps, at 0. *)
Definition slope_of (phi dphi : R -> R) : Prop :=
  forall v, v <> 0 -> is_derive phi v (dphi v).

Section Shares.
Variables (phi dphi : R -> R) (l : list place).

Definition v (p : place) : R := gamma p * y p + beta p.
Definition power : R := sum (fun p => phi (v p) ^ 2) l.
Definition moved : R :=
  mean (fun p => y p ^ 2) l * sum (fun p => gamma p ^ 2 * dphi (v p) ^ 2) l.

Definition s : R := moved / power.
Definition b : R := sum (fun p => beta p * dphi (v p) * phi (v p)) l / power.
Definition D : R :=
  (sum (fun p => phi (v p) * dphi (v p) * gamma p * y p) l - moved) / power.
(** What Euler's identity leaves where phi is not positive homogeneous. *)
Definition rest : R :=
  1 - sum (fun p => phi (v p) * dphi (v p) * v p) l / power.

Lemma shares_rest : power <> 0 -> s = 1 - b - D - rest.
Proof.
  intros some. unfold s, b, D, rest.
  rewrite (sum_ext (fun p => phi (v p) * dphi (v p) * v p)
    (fun p => phi (v p) * dphi (v p) * gamma p * y p
      + beta p * dphi (v p) * phi (v p)))
    by (intros; unfold v; ring).
  rewrite sum_plus. field. easy.
Qed.

(** Euler: a positive homogeneous function is its slope times the place. *)
Lemma euler : positive_homogeneous phi -> slope_of phi dphi ->
  forall v, phi v = dphi v * v.
Proof.
  intros hom slope u. destruct (Req_dec u 0) as [->|apart].
  - pose proof (hom 2 0) as twice. rewrite Rmult_0_r in *. lra.
  - assert (one : is_derive (fun c => phi (c * u)) 1 (phi u)).
    { apply (is_derive_ext_loc (fun c => c * phi u)).
      - apply (locally_open (fun c => 0 < c)); [apply open_gt| |simpl; lra].
        intros c pos. now rewrite hom.
      - auto_derive; [easy|ring]. }
    assert (two : is_derive (fun c => phi (c * u)) 1 (u * dphi u)).
    { apply (is_derive_comp phi (fun c => c * u) 1 (dphi u) u).
      - rewrite Rmult_1_l. now apply slope.
      - auto_derive; [easy|ring]. }
    rewrite <- (is_derive_unique _ _ _ one), (is_derive_unique _ _ _ two). ring.
Qed.

End Shares.

Theorem shares : forall (phi dphi : R -> R) (l : list place),
  positive_homogeneous phi -> slope_of phi dphi -> power phi l <> 0 ->
  s phi dphi l = 1 - b phi dphi l - D phi dphi l.
Proof.
  intros phi dphi l hom slope some. rewrite shares_rest by easy.
  replace (rest phi dphi l) with 0; [ring|]. unfold rest.
  rewrite (sum_ext _ (fun p => phi (v p) ^ 2)).
  - fold (power phi l). field. easy.
  - intros p _. rewrite Rmult_assoc, <- (euler phi dphi hom slope). ring.
Qed.

(** ReLU and the leaky ones are such functions. *)
Definition relu (leak u : R) : R := if Rle_dec 0 u then u else leak * u.
Definition drelu (leak u : R) : R := if Rle_dec 0 u then 1 else leak.

Lemma relu_homogeneous leak : positive_homogeneous (relu leak).
Proof.
  intros c u pos. unfold relu.
  destruct (Rle_dec 0 u), (Rle_dec 0 (c * u)); try ring; nra.
Qed.

Lemma relu_slope leak : slope_of (relu leak) (drelu leak).
Proof.
  intros u apart. unfold drelu. destruct (Rle_dec 0 u).
  - apply (is_derive_ext_loc (fun t => t)); [|auto_derive; [easy|ring]].
    apply (locally_open (fun t => 0 < t)); [apply open_gt| |simpl; lra].
    intros t pos. unfold relu. destruct (Rle_dec 0 t); lra.
  - apply (is_derive_ext_loc (fun t => leak * t));
      [|auto_derive; [easy|ring]].
    apply (locally_open (fun t => t < 0)); [apply open_lt| |simpl; lra].
    intros t neg. unfold relu. destruct (Rle_dec 0 t); lra.
Qed.

Corollary shares_relu : forall (leak : R) (l : list place),
  power (relu leak) l <> 0 ->
  s (relu leak) (drelu leak) l
  = 1 - b (relu leak) (drelu leak) l - D (relu leak) (drelu leak) l.
Proof.
  intros. apply shares; auto using relu_homogeneous, relu_slope.
Qed.

(** ** Mutants, which Coq refuses *)

(** Without homogeneity: the square, at one place. *)
Theorem shares_mutant_homogeneous : ~ forall phi dphi l,
  slope_of phi dphi -> power phi l <> 0 ->
  s phi dphi l = 1 - b phi dphi l - D phi dphi l.
Proof.
  intros wrong.
  specialize (wrong (fun u => u ^ 2) (fun u => 2 * u)
    [{| y := 1; gamma := 1; beta := 0 |}]).
  unfold s, b, D, moved, power, v, mean in wrong; simpl in wrong.
  assert (slope_of (fun u => u * (u * 1)) (fun u => 2 * u))
    by (intros u _; auto_derive; [easy|ring]).
  specialize (wrong H ltac:(lra)). lra.
Qed.

(** With the sign of the bias's share turned: one unit with a bias. *)
Theorem shares_mutant_sign : ~ forall leak l, power (relu leak) l <> 0 ->
  s (relu leak) (drelu leak) l
  = 1 + b (relu leak) (drelu leak) l - D (relu leak) (drelu leak) l.
Proof.
  intros wrong. specialize (wrong 0 [{| y := 1; gamma := 1; beta := 1 |}]).
  unfold s, b, D, moved, power, v, mean, relu, drelu in wrong; simpl in wrong.
  destruct (Rle_dec 0 (1 * 1 + 1)); [|lra].
  specialize (wrong ltac:(lra)). lra.
Qed.

(** The proof without its condition does not go through either. *)
Goal forall phi dphi l, slope_of phi dphi -> power phi l <> 0 ->
  s phi dphi l = 1 - b phi dphi l - D phi dphi l.
Proof.
  intros phi dphi l slope some. rewrite shares_rest by easy.
  Fail replace (rest phi dphi l) with 0 by (unfold rest; field; easy).
Abort.

Print Assumptions shares.
Print Assumptions shares_relu.
Print Assumptions shares_mutant_homogeneous.
Print Assumptions shares_mutant_sign.
