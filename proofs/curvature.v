(** The step of chapter 220 divides by the second derivative, at lambda = 1, of
    the negative log-likelihood of Yeo and Johnson's power transform. For every
    finite standardized sample (mean 0, mean of squares 1, any length), this
    second derivative is at least 2 (1 - ln 2)^2 + omega, where omega >= 0 is
    the variance that a regression of d on the sample leaves; it equals
    2 (1 - ln 2)^2 only for samples of -1 and +1, and for -1, +1 it does. The
    likelihood is that of chapter 210, and its second derivative is
    Coquelicot's [Derive_n]. *)
From Coq Require Import Reals List Lra Psatz.
From Interval Require Import Tactic Specific_ops Specific_stdz.
From Coquelicot Require Import Coquelicot.
From normalnorm Require Import sums yeo_johnson.
Import ListNotations.
Open Scope R_scope.

(** Interval arithmetic on Coq's own integers: the processor's, which [interval]
    uses by itself, would each be an axiom. *)
Module Floats := SpecificFloat StdZRadix2.
Module Intervals := IntervalTactic Floats.
Import Intervals.

Definition standardized (h : list R) : Prop :=
  mean (fun x => x) h = 0 /\ mean (fun x => x ^ 2) h = 1.

Definition d (x : R) : R := (1 + Rabs x) * ln (1 + Rabs x) - Rabs x.

(** Mean of the squares that the least-squares line of d on x leaves. *)
Definition omega (h : list R) : R :=
  mean (fun x => (d x - mean d h - mean (fun x => x * d x) h * x) ^ 2) h.

(** ** The second derivative *)

Definition d2 (x : R) : R :=
  sign x * ((1 + Rabs x) * ln (1 + Rabs x) ^ 2 - 2 * d x).

Definition E1 (eta l : R) : R := (eta * l * exp (eta * l) - exp (eta * l) + 1)
  / eta ^ 2.

Definition E2 (eta l : R) : R := l ^ 2 * exp (eta * l) / eta
  - 2 * (eta * l * exp (eta * l) - exp (eta * l) + 1) / eta ^ 3.

Lemma sign_cases x : sign x = 1 /\ x = Rabs x \/ sign x = -1 /\ x = - Rabs x.
Proof.
  unfold sign. destruct (Rle_dec 0 x) as [pos|neg]; [left|right]; split; auto.
  - now rewrite Rabs_pos_eq.
  - rewrite Rabs_left by lra; lra.
Qed.

Lemma expm1_over_derive eta l :
  0 < eta -> is_derive (fun eta => expm1_over eta l) eta (E1 eta l).
Proof.
  intros pos. apply (is_derive_ext_loc (fun eta => (exp (eta * l) - 1) / eta)).
  - apply (locally_open (fun u => 0 < u)); [apply open_gt| |exact pos].
    intros u nz. unfold expm1_over. destruct (Req_EM_T u 0); lra.
  - unfold E1. auto_derive; [lra|]. field; lra.
Qed.

Lemma E1_derive eta l :
  0 < eta -> is_derive (fun eta => E1 eta l) eta (E2 eta l).
Proof.
  intros pos. unfold E1, E2. auto_derive.
  - nra.
  - field; lra.
Qed.

Definition psi1 (x lambda : R) : R :=
  E1 (1 + sign x * (lambda - 1)) (ln (1 + Rabs x)).

Definition psi2 (x lambda : R) : R :=
  sign x * E2 (1 + sign x * (lambda - 1)) (ln (1 + Rabs x)).

Lemma psi_derive x lambda :
  0 < lambda < 2 -> is_derive (psi x) lambda (psi1 x lambda).
Proof.
  intros near. unfold psi, psi1.
  assert (pos : 0 < 1 + sign x * (lambda - 1))
    by (destruct (sign_cases x) as [[-> _]|[-> _]]; lra).
  evar_last.
  - apply is_derive_scal.
    apply (is_derive_comp (fun eta => expm1_over eta _)).
    + now apply expm1_over_derive.
    + auto_derive; [easy|reflexivity].
  - unfold scal; simpl; unfold mult; simpl.
    destruct (sign_cases x) as [[-> _]|[-> _]]; ring.
Qed.

Lemma psi1_derive x lambda :
  0 < lambda < 2 -> is_derive (psi1 x) lambda (psi2 x lambda).
Proof.
  intros near. unfold psi1, psi2.
  assert (pos : 0 < 1 + sign x * (lambda - 1))
    by (destruct (sign_cases x) as [[-> _]|[-> _]]; lra).
  evar_last.
  - apply (is_derive_comp (fun eta => E1 eta _)).
    + now apply E1_derive.
    + auto_derive; [easy|reflexivity].
  - unfold scal; simpl; unfold mult; simpl; ring.
Qed.

Lemma exp_ln_1 x : exp (1 * ln (1 + Rabs x)) = 1 + Rabs x.
Proof. rewrite Rmult_1_l. apply exp_ln, abs_pos_1. Qed.

Lemma psi_at_1 x : psi x 1 = x.
Proof.
  unfold psi, expm1_over.
  replace (1 + sign x * (1 - 1)) with 1 by ring. rewrite exp_ln_1.
  destruct (Req_EM_T 1 0); [lra|].
  destruct (sign_cases x) as [[-> same]|[-> same]]; rewrite same at 2; field.
Qed.

Lemma psi1_at_1 x : psi1 x 1 = d x.
Proof.
  unfold psi1, E1, d. replace (1 + sign x * (1 - 1)) with 1 by ring.
  rewrite exp_ln_1. field.
Qed.

Lemma psi2_at_1 x : psi2 x 1 = d2 x.
Proof.
  unfold psi2, E2, d2, d. replace (1 + sign x * (1 - 1)) with 1 by ring.
  rewrite exp_ln_1. field.
Qed.

Lemma mean_derive (F F' : R -> R -> R) h lambda :
  (forall x, is_derive (F x) lambda (F' x lambda)) ->
  is_derive (fun l => mean (fun x => F x l) h) lambda
    (mean (fun x => F' x lambda) h).
Proof.
  intros each. unfold mean, Rdiv.
  apply (is_derive_ext (fun l => / INR (length h) * sum (fun x => F x l) h)).
  { intros; apply Rmult_comm. }
  rewrite Rmult_comm. apply is_derive_scal.
  induction h as [|x h IH]; simpl.
  - apply @is_derive_const.
  - apply @is_derive_plus; auto.
Qed.

Section Derivatives.
Variable h : list R.
Hypothesis some : h <> nil.

Definition variance1 lambda :=
  2 * (mean (fun x => psi x lambda * psi1 x lambda) h
  - mean (fun x => psi x lambda) h * mean (fun x => psi1 x lambda) h).

Definition variance2 lambda :=
  2 * (mean (fun x => psi1 x lambda ^ 2 + psi x lambda * psi2 x lambda) h
  - (mean (fun x => psi1 x lambda) h ^ 2
     + mean (fun x => psi x lambda) h * mean (fun x => psi2 x lambda) h)).

Lemma variance_derive lambda :
  0 < lambda < 2 -> is_derive (variance h) lambda (variance1 lambda).
Proof.
  intros near.
  apply (is_derive_ext (fun l => mean (fun x => psi x l ^ 2) h
    - mean (fun x => psi x l) h * mean (fun x => psi x l) h)).
  { intros l. rewrite variance_squares by easy. simpl; ring. }
  pose proof (mean_derive psi psi1 h lambda
    (fun x => psi_derive x lambda near)) as first.
  evar_last.
  - apply @is_derive_minus.
    + apply (mean_derive (fun x l => psi x l ^ 2)
        (fun x l => 2 * (psi x l * psi1 x l))). intros x.
      evar_last; [apply is_derive_pow, psi_derive, near|simpl; ring].
    + apply @is_derive_mult; [exact first..|apply Rmult_comm].
  - unfold variance1. rewrite mean_scal.
    unfold minus, plus, opp, mult; simpl. ring.
Qed.

Lemma variance1_derive lambda :
  0 < lambda < 2 -> is_derive variance1 lambda (variance2 lambda).
Proof.
  intros near. unfold variance1.
  pose proof (mean_derive psi psi1 h lambda
    (fun x => psi_derive x lambda near)) as first.
  pose proof (mean_derive psi1 psi2 h lambda
    (fun x => psi1_derive x lambda near)) as second.
  evar_last.
  - apply is_derive_scal, @is_derive_minus.
    + apply (mean_derive (fun x l => psi x l * psi1 x l)
        (fun x l => psi1 x l ^ 2 + psi x l * psi2 x l)). intros x.
      evar_last.
      * apply @is_derive_mult;
          [now apply psi_derive|now apply psi1_derive|apply Rmult_comm].
      * unfold plus, mult; simpl; ring.
    + apply @is_derive_mult; [exact first|exact second|apply Rmult_comm].
  - unfold variance2. unfold minus, plus, opp, mult; simpl. ring.
Qed.

Hypothesis spread : 0 < variance h 1.

Definition nll1 lambda :=
  variance1 lambda / (2 * variance h lambda) - mean slog h.

Lemma nll_derive lambda :
  0 < lambda < 2 -> 0 < variance h lambda ->
  is_derive (nll h) lambda (nll1 lambda).
Proof.
  intros near pos. unfold nll, nll1.
  pose proof (variance_derive lambda near) as first.
  auto_derive.
  - repeat split; [now exists (variance1 lambda)|exact pos].
  - replace (Derive (fun l => variance h l) lambda) with (variance1 lambda).
    + field. lra.
    + symmetry. now apply is_derive_unique.
Qed.

Lemma nll1_derive : is_derive (Derive (nll h)) 1
  (variance2 1 / (2 * variance h 1) - variance1 1 ^ 2 / (2 * variance h 1 ^ 2)).
Proof.
  assert (near : 0 < 1 < 2) by lra.
  pose proof (variance_derive 1 near) as first.
  pose proof (variance1_derive 1 near) as second.
  apply (is_derive_ext_loc nll1).
  - assert (C : continuous (variance h) 1)
      by (apply @ex_derive_continuous; now exists (variance1 1)).
    assert (L : locally 1 (fun l => 0 < variance h l))
      by (apply C, (locally_open (fun u => 0 < u)); [apply open_gt|easy..]).
    assert (M : locally 1 (fun l => 0 < l < 2))
      by (apply (locally_interval _ _ 0 2); simpl; auto; lra).
    generalize (filter_and _ _ L M). apply filter_imp. intros l [pos here].
    now symmetry; apply is_derive_unique, nll_derive.
  - unfold nll1. auto_derive.
    + repeat split; [now exists (variance2 1)|now exists (variance1 1)|lra].
    + replace (Derive (fun l => variance h l) 1) with (variance1 1)
        by (symmetry; now apply is_derive_unique).
      replace (Derive (fun l => variance1 l) 1) with (variance2 1)
        by (symmetry; now apply is_derive_unique).
      field. lra.
Qed.

End Derivatives.

(** ** The identity *)

Definition q (x : R) : R := (1 + Rabs x) * ln (1 + Rabs x) ^ 2.

Definition slope (h : list R) : R := mean (fun x => x * d x) h.

(** The function of chapter 225: T the target, t and c free. *)
Definition f (T t c a : R) : R :=
  1 - T - t ^ 2 - c - (1 + a) * ln (1 + a) ^ 2
  + 2 * t * ((1 + a) * ln (1 + a) - a) + c * a ^ 2.

Lemma standardized_some h : standardized h -> h <> nil.
Proof. intros [_ two] ->. unfold mean in two; simpl in two. lra. Qed.

Lemma omega_means h : standardized h ->
  omega h = mean (fun x => d x ^ 2) h - mean d h ^ 2 - slope h ^ 2.
Proof.
  intros std. pose proof (standardized_some h std) as some.
  destruct std as [one two]. unfold omega. fold (slope h).
  set (m := mean d h). set (b := slope h).
  rewrite (mean_ext _ (fun x => d x ^ 2 + (-2 * m * d x + (-2 * b * (x * d x)
    + (b ^ 2 * x ^ 2 + (2 * m * b * x + m ^ 2)))))) by (intros; ring).
  rewrite !mean_plus, !mean_scal, mean_const by easy.
  rewrite one, two. fold m (slope h) b. ring.
Qed.

Lemma second_is_derive h : standardized h ->
  is_derive_n (nll h) 2 1 (1 - mean q h + mean d h ^ 2 + 2 * omega h).
Proof.
  intros std. change (is_derive (Derive (nll h)) 1
    (1 - mean q h + mean d h ^ 2 + 2 * omega h)).
  pose proof (standardized_some h std) as some.
  rewrite omega_means by easy. destruct std as [one two].
  assert (V : variance h 1 = 1).
  { rewrite variance_squares by easy.
    rewrite (mean_ext _ (fun x => x ^ 2)) by (intros; now rewrite psi_at_1).
    rewrite (mean_ext (fun x => psi x 1) (fun x => x))
      by (intros; apply psi_at_1).
    rewrite one, two; ring. }
  evar_last; [apply nll1_derive; [easy|lra]|]. rewrite V.
  unfold variance1, variance2.
  rewrite (mean_ext (fun x => psi x 1 * psi1 x 1) (fun x => x * d x))
    by (intros; now rewrite psi_at_1, psi1_at_1).
  rewrite (mean_ext (fun x => psi x 1) (fun x => x))
    by (intros; apply psi_at_1).
  rewrite (mean_ext (fun x => psi1 x 1) d) by (intros; apply psi1_at_1).
  rewrite (mean_ext (fun x => psi1 x 1 ^ 2 + psi x 1 * psi2 x 1)
    (fun x => 2 * d x ^ 2 + (x ^ 2 + -1 * q x))).
  - rewrite !mean_plus, !mean_scal, one, two. fold (slope h). field.
  - intros x _. rewrite psi_at_1, psi1_at_1, psi2_at_1. unfold d2, q, d.
    destruct (sign_cases x) as [[-> same]|[-> same]];
      set (a := Rabs x) in *; clearbody a; subst x; ring.
Qed.

Theorem second_derivative : forall h : list R, standardized h ->
  Derive_n (nll h) 2 1 = 1 - mean q h + mean d h ^ 2 + 2 * omega h.
Proof. intros. now apply is_derive_n_unique, second_is_derive. Qed.

Theorem identity : forall (h : list R) (T t c : R), standardized h ->
  Derive_n (nll h) 2 1 = T + omega h
    + mean (fun x => f T t c (Rabs x) + (d x - t - slope h * x) ^ 2) h.
Proof.
  intros h T t c std. rewrite second_derivative by easy.
  pose proof (omega_means h std) as rest.
  pose proof (standardized_some h std) as some. destruct std as [one two].
  set (b := slope h) in *.
  rewrite (mean_ext (fun x => f T t c (Rabs x) + (d x - t - b * x) ^ 2)
    (fun x => (1 - T - c) + (-1 * q x + (d x ^ 2
    + ((c + b ^ 2) * x ^ 2 + (2 * t * b * x + -2 * b * (x * d x))))))).
  - rewrite !mean_plus, !mean_scal, mean_const by easy.
    fold (slope h). fold b. rewrite one, two, rest. ring.
  - intros x _. unfold f, q, d. rewrite pow2_abs. ring.
Qed.

(** ** Two inequalities in one variable *)

Definition T0 : R := 2 * (1 - ln 2) ^ 2.
Definition t1 : R := 2 * ln 2 - 1.
Definition c1 : R := 2 * ln 2 - 3 / 2 * ln 2 ^ 2.
Definition t2 : R := 7 / 20.
Definition c2 : R := 17 / 25.

Definition pos (y : R) : R := (y + Rabs y) / 2.

Definition f' (t c a : R) : R :=
  2 * t * ln (1 + a) - ln (1 + a) ^ 2 - 2 * ln (1 + a) + 2 * c * a.

Definition f'' (t c a : R) : R := 2 * c - 2 * (1 + ln (1 + a) - t) / (1 + a).

Lemma f_derive T t c a : 0 <= a -> is_derive (f T t c) a (f' t c a).
Proof. intros. unfold f, f'. auto_derive; [lra|]. field; lra. Qed.

Lemma f'_derive t c a : 0 <= a -> is_derive (f' t c) a (f'' t c a).
Proof. intros. unfold f', f''. auto_derive; [lra|]. field; lra. Qed.

(** ln lies below its tangent. *)
Lemma ln_tangent y z : 0 < y -> 0 < z -> ln y <= ln z + (y - z) / z.
Proof.
  intros. replace (ln y) with (ln z + ln (y / z))
    by (rewrite <- ln_mult; [f_equal; field; lra|lra|
        apply Rdiv_lt_0_compat; lra]).
  assert (0 < y / z) by (apply Rdiv_lt_0_compat; lra).
  pose proof (exp_ineq1_le (ln (y / z))) as above.
  rewrite exp_ln in above by easy.
  replace ((y - z) / z) with (y / z - 1) by (field; lra). lra.
Qed.

(** f is convex from [low] on: one inequality at [low], one for the slope. *)
Lemma f''_pos t c low a :
  0 <= low <= a -> / (1 + low) <= c ->
  0 < c * (1 + low) - 1 - ln (1 + low) + t -> 0 < f'' t c a.
Proof.
  intros order steep start. unfold f''.
  pose proof (ln_tangent (1 + a) (1 + low)) as line.
  assert (0 <= (c - / (1 + low)) * (a - low)) by (apply Rmult_le_pos; lra).
  assert (ln (1 + a) <= ln (1 + low) + / (1 + low) * (a - low)).
  { eapply Rle_trans; [apply line; lra|]. apply Req_le; field; lra. }
  replace (2 * c - 2 * (1 + ln (1 + a) - t) / (1 + a))
    with (2 * (c * (1 + a) - (1 + ln (1 + a) - t)) / (1 + a)) by (field; lra).
  apply Rdiv_lt_0_compat; [|lra]. nra.
Qed.

(** A convex function lies above its tangents. *)
Lemma f_tangent T t c low p a :
  (forall x, low <= x -> 0 < f'' t c x) -> 0 <= low -> low <= p -> low <= a ->
  a <> p -> f T t c p + f' t c p * (a - p) < f T t c a.
Proof.
  intros convex pos_low at_p at_a apart.
  assert (V : forall x, 0 <= x -> derivable_pt_lim (f T t c) x (f' t c x))
    by (intros; now apply is_derive_Reals, f_derive).
  assert (W : forall x, 0 <= x -> derivable_pt_lim (f' t c) x (f'' t c x))
    by (intros; now apply is_derive_Reals, f'_derive).
  destruct (Rtotal_order p a) as [less|[same|more]]; [|now symmetry in same|].
  - destruct (MVT_cor2 (f T t c) (f' t c) p a less) as [x [E inside]];
      [intros; apply V; lra|].
    destruct (MVT_cor2 (f' t c) (f'' t c) p x) as [y [F between]];
      [easy|intros; apply W; lra|].
    assert (0 < f'' t c y * (x - p))
      by (apply Rmult_lt_0_compat; [apply convex|]; lra).
    nra.
  - destruct (MVT_cor2 (f T t c) (f' t c) a p more) as [x [E inside]];
      [intros; apply V; lra|].
    destruct (MVT_cor2 (f' t c) (f'' t c) x p) as [y [F between]];
      [easy|intros; apply W; lra|].
    assert (0 < f'' t c y * (p - x))
      by (apply Rmult_lt_0_compat; [apply convex|]; lra).
    nra.
Qed.

Lemma ln_1_1 : ln (1 + 1) = ln 2.
Proof. f_equal; lra. Qed.

Lemma f1_touches : f T0 t1 c1 1 = 0 /\ f' t1 c1 1 = 0.
Proof. unfold f, f', T0, t1, c1. rewrite ln_1_1. split; field. Qed.

Lemma convex_1 a : 7 / 8 <= a -> 0 < f'' t1 c1 a.
Proof.
  intros. apply (f''_pos _ _ (7 / 8)); [lra| |]; unfold c1, t1;
    interval with (i_prec 40).
Qed.

Lemma convex_2 a : 3 <= a -> 0 < f'' t2 c2 a.
Proof.
  intros. apply (f''_pos _ _ 3); [lra| |]; unfold c2, t2;
    interval with (i_prec 40).
Qed.

(** Up to 1/2 the square is needed, from there on f alone will do. *)
Lemma certificate_1 a : 0 <= a -> a <> 1 ->
  0 < f T0 t1 c1 a + pos (Rabs ((1 + a) * ln (1 + a) - a - t1) - a / 2) ^ 2.
Proof.
  intros pos_a apart. destruct (Rle_lt_dec a (1 / 2)) as [low|high].
  - assert (0 < t1 - ((1 + a) * ln (1 + a) - a) - a / 2)
      by (unfold t1; interval with (i_bisect a, i_prec 40)).
    rewrite (Rabs_left (_ - t1)) by lra. unfold pos.
    rewrite Rabs_pos_eq by lra. unfold f, T0, t1, c1.
    interval with (i_bisect a, i_taylor a, i_prec 40).
  - pose proof (pow2_ge_0 (pos (Rabs ((1 + a) * ln (1 + a) - a - t1) - a / 2))).
    enough (0 < f T0 t1 c1 a) by lra. destruct (Rle_lt_dec a (7 / 8)).
    + unfold f, T0, t1, c1. interval with (i_bisect a, i_taylor a, i_prec 40).
    + pose proof (f_tangent T0 t1 c1 (7 / 8) 1 a convex_1) as above.
      destruct f1_touches as [-> ->] in above. lra.
Qed.

Lemma certificate_2 a : 0 <= a ->
  0 < f T0 t2 c2 a + pos (a / 2 - Rabs ((1 + a) * ln (1 + a) - a - t2)) ^ 2.
Proof.
  intros pos_a. destruct (Rle_dec a 3) as [near|far].
  - unfold f, pos, T0, t2, c2.
    interval with (i_bisect a, i_depth 30, i_prec 30).
  - pose proof (f_tangent T0 t2 c2 3 3 a convex_2) as above.
    assert (0 < f T0 t2 c2 3) by (unfold f, T0, t2, c2;
      interval with (i_prec 40)).
    assert (0 < f' t2 c2 3) by (unfold f', t2, c2;
      interval with (i_prec 40)).
    pose proof (pow2_ge_0 (pos (a / 2 - Rabs ((1 + a) * ln (1 + a) - a - t2)))).
    nra.
Qed.

Lemma pos_square y u : y <= Rabs u -> pos y ^ 2 <= u ^ 2.
Proof.
  intros below. rewrite <- (pow2_abs u). unfold pos.
  pose proof (Rabs_pos u).
  destruct (Rle_dec 0 y) as [p|n].
  - rewrite (Rabs_pos_eq y) by easy. apply pow_incr. lra.
  - rewrite (Rabs_left y) by lra. nra.
Qed.

(** Each sample falls under one of the two. *)
Lemma pointwise b : exists t c, forall x,
  0 <= f T0 t c (Rabs x) + (d x - t - b * x) ^ 2 /\
  (f T0 t c (Rabs x) + (d x - t - b * x) ^ 2 = 0 -> x = 1 \/ x = -1).
Proof.
  destruct (Rle_dec (Rabs b) (1 / 2)) as [small|large].
  - exists t1, c1. intros x.
    assert (S :
      pos (Rabs (d x - t1) - Rabs x / 2) ^ 2 <= (d x - t1 - b * x) ^ 2).
    { apply pos_square. pose proof (Rabs_triang_inv (d x - t1) (b * x)) as tri.
      rewrite Rabs_mult in tri. pose proof (Rabs_pos x). nra. }
    destruct (Req_dec (Rabs x) 1) as [same|apart].
    + split.
      * rewrite same. destruct f1_touches as [-> _].
        pose proof (pow2_ge_0 (d x - t1 - b * x)). lra.
      * intros _. destruct (sign_cases x) as [[_ E]|[_ E]]; lra.
    + pose proof (certificate_1 (Rabs x) (Rabs_pos x) apart) as strict.
      fold (d x) in strict. split; [lra|]. intros; lra.
  - exists t2, c2. intros x.
    assert (S :
      pos (Rabs x / 2 - Rabs (d x - t2)) ^ 2 <= (d x - t2 - b * x) ^ 2).
    { apply pos_square. rewrite (Rabs_minus_sym (d x - t2)).
      pose proof (Rabs_triang_inv (b * x) (d x - t2)) as tri.
      rewrite Rabs_mult in tri. pose proof (Rabs_pos x). nra. }
    pose proof (certificate_2 (Rabs x) (Rabs_pos x)) as strict.
    fold (d x) in strict. split; [lra|]. intros; lra.
Qed.

(** ** The theorem *)

Lemma omega_nonneg h : standardized h -> 0 <= omega h.
Proof.
  intros std. apply mean_nonneg; [now apply standardized_some|].
  intros; apply pow2_ge_0.
Qed.

(** [Derive_n] is a number for every function: that it is the derivative is the
    first part. *)
Theorem curvature_sharp : forall h : list R, standardized h ->
  ex_derive_n (nll h) 2 1 /\ 0 <= omega h /\
  2 * (1 - ln 2) ^ 2 + omega h <= Derive_n (nll h) 2 1 /\
  (Derive_n (nll h) 2 1 = 2 * (1 - ln 2) ^ 2 ->
   forall x, In x h -> x = 1 \/ x = -1).
Proof.
  intros h std. pose proof (omega_nonneg h std) as rest.
  pose proof (standardized_some h std) as some.
  destruct (pointwise (slope h)) as [t [c point]].
  rewrite (identity h T0 t c std). fold T0.
  split; [eexists; now apply second_is_derive|]. split; [easy|].
  assert (above : 0 <= mean (fun x => f T0 t c (Rabs x)
    + (d x - t - slope h * x) ^ 2) h).
  { apply mean_nonneg; [easy|]. intros x _. apply point. }
  split; [lra|]. intros equal x inside. apply point.
  apply (mean_zero
    (fun x => f T0 t c (Rabs x) + (d x - t - slope h * x) ^ 2) h);
    [|lra|easy].
  intros y _. apply point.
Qed.

(** The bound of chapter 225 in its shortest form. *)
Corollary curvature_bound : forall h : list R, standardized h ->
  2 * (1 - ln 2) ^ 2 <= Derive_n (nll h) 2 1.
Proof.
  intros h std. destruct (curvature_sharp h std) as [_ [? [? _]]]. lra.
Qed.

(** The weaker bound of one certificate. *)
Corollary curvature_well_posed : forall h : list R, standardized h ->
  1879 / 10000 <= Derive_n (nll h) 2 1.
Proof.
  intros h std. eapply Rle_trans; [|now apply curvature_bound].
  interval with (i_prec 40).
Qed.

(** The bound is attained. *)
Theorem curvature_attained :
  standardized [1; -1] /\ Derive_n (nll [1; -1]) 2 1 = 2 * (1 - ln 2) ^ 2.
Proof.
  assert (std : standardized [1; -1]).
  { split; unfold mean; simpl; field. }
  split; [easy|]. rewrite (second_derivative _ std).
  unfold omega, mean, q, d; simpl.
  rewrite (Rabs_left (-1)), (Rabs_pos_eq 1) by lra.
  replace (1 + - -1) with 2 by ring. rewrite ln_1_1. field.
Qed.

(** ** Mutants, which Coq refuses *)

(** A target larger by 1/1000 has no certificate. *)
Goal forall a, 1 / 2 <= a <= 7 / 8 -> 0 < f (T0 + 1 / 1000) t1 c1 a.
Proof.
  intros a range. unfold f, T0, t1, c1.
  Fail interval with (i_bisect a, i_taylor a, i_prec 40).
Abort.

(** Nor has the target itself without the square. *)
Goal forall a, 0 <= a <= 1 / 2 -> 0 < f T0 t1 c1 a.
Proof.
  intros a range. unfold f, T0, t1, c1.
  Fail interval with (i_bisect a, i_taylor a, i_prec 40).
Abort.

(** A bound larger by 10^-9 is refuted. *)
Theorem curvature_mutant : ~ forall h : list R, standardized h ->
  2 * (1 - ln 2) ^ 2 + 1 / 10 ^ 9 <= Derive_n (nll h) 2 1.
Proof.
  intros wrong. destruct curvature_attained as [std equal].
  specialize (wrong _ std). lra.
Qed.

Print Assumptions second_derivative.
Print Assumptions identity.
Print Assumptions curvature_sharp.
Print Assumptions curvature_well_posed.
Print Assumptions curvature_attained.
Print Assumptions curvature_mutant.
